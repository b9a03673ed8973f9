// One multiplication of whole tiles, by the tile registers of the including file.

#pragma once

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

inline void dot_whole_tiles(const uint16_t* a, const uint16_t* b, float* c) {
  tiles::Shapes shapes;
  for (int tile = 0; tile < 3; ++tile) shapes.set(tile, tiles::kRows, tiles::kRowBytes);
  tiles::configure(shapes);
  tiles::load<0>(c, tiles::kRowBytes);
  tiles::load<1>(a, tiles::kRowBytes);
  tiles::load<2>(b, tiles::kRowBytes);
  tiles::dot<0, 1, 2>();
  tiles::store<0>(c, tiles::kRowBytes);
  tiles::release();
}

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA

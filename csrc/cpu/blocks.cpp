// copy_blocks, gather_blocks and scatter_blocks.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernel_table.h"
#include "pagedkv/cpu.h"
#include "pagedkv/error.h"
#include "thread_pool.h"
#include "work_memory.h"

namespace pagedkv::cpu {
namespace {

constexpr int64_t kBytesPerThread = 256 << 10;
constexpr int64_t kPieceBytes = 128 << 10;

void check_ids(const char* name, const int64_t* ids, int64_t count, int64_t num_blocks,
               const char* where) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] >= 0 && ids[i] < num_blocks) continue;
    throw UsageError(std::string(name) + ": expected block ids from 0 to " +
                     std::to_string(num_blocks - 1) + ", got " + std::to_string(ids[i]) + ", in " +
                     where);
  }
}

int64_t num_runs(const BlocksView& view) {
  int64_t runs = 1;
  for (int32_t dim = 0; dim < view.num_dims; ++dim) runs *= view.sizes[dim];
  return runs;
}

/// Where a run of a block begins, given its number and the sizes that both sides share.
char* run_at(const BlocksView& view, int64_t block, int64_t run) {
  char* at = static_cast<char*>(view.data) + block * view.block_stride;
  for (int32_t dim = view.num_dims; dim-- > 0;) {
    at += run % view.sizes[dim] * view.strides[dim];
    run /= view.sizes[dim];
  }
  return at;
}

struct Move {
  int64_t source, destination;  // block ids
};

// Copies runs of blocks between views of one shape. The moves must not depend on each other.
class Mover {
 public:
  Mover(const Isa& isa, const BlocksView& from, const BlocksView& to, int64_t num_moves)
      : from_(from), to_(to), run_bytes_(from.run_bytes), num_runs_(num_runs(from)) {
    const int64_t total = num_moves * num_runs_ * run_bytes_;
    copy_ = total > kStreamingBytes ? isa.kernels->copy_streaming : copy_cached;
    // Long runs are cut, short ones put together.
    cuts_ = std::max<int64_t>(1, run_bytes_ / kPieceBytes);
    total_ = total;
  }

  void run(const Move* moves, int64_t num_moves, int num_threads) const {
    const int64_t num_pieces = num_moves * num_runs_ * cuts_;
    const int64_t step =
        std::max<int64_t>(1, kPieceBytes / std::max<int64_t>(1, run_bytes_ / cuts_));
    const int64_t threads = std::min<int64_t>(num_threads, 1 + total_ / kBytesPerThread);
    ThreadPool::run(static_cast<int>(threads), (num_pieces + step - 1) / step, [&](int64_t i) {
      const int64_t end = std::min(num_pieces, (i + 1) * step);
      for (int64_t piece = i * step; piece < end; ++piece) copy_piece(moves, piece);
    });
  }

 private:
  static void copy_cached(void* to, const void* from, int64_t num_bytes) {
    std::memcpy(to, from, num_bytes);
  }

  void copy_piece(const Move* moves, int64_t piece) const {
    const int64_t cut = piece % cuts_, run = piece / cuts_ % num_runs_;
    const Move& move = moves[piece / cuts_ / num_runs_];
    const int64_t begin = cut * run_bytes_ / cuts_ & ~int64_t{63};
    const int64_t end =
        cut + 1 == cuts_ ? run_bytes_ : (cut + 1) * run_bytes_ / cuts_ & ~int64_t{63};
    copy_(run_at(to_, move.destination, run) + begin, run_at(from_, move.source, run) + begin,
          end - begin);
  }

  const BlocksView &from_, &to_;
  const int64_t run_bytes_, num_runs_;
  int64_t cuts_, total_;
  void (*copy_)(void*, const void*, int64_t);
};

/// Orders copies so that a block is read before it is written; the last of several copies onto one
/// block counts. Where copies form a ring, one block goes through memory aside.
class OrderedCopies {
 public:
  OrderedCopies(const int64_t* sources, const int64_t* destinations, int64_t count) {
    for (int64_t i = 0; i < count; ++i) moves_.push_back({sources[i], destinations[i]});
    std::ranges::stable_sort(moves_, {}, &Move::destination);
    // Of equal destinations keep the last; drop copies of a block onto itself.
    size_t kept = 0;
    for (size_t i = 0; i < moves_.size(); ++i) {
      if (i + 1 < moves_.size() && moves_[i + 1].destination == moves_[i].destination) continue;
      if (moves_[i].source != moves_[i].destination) moves_[kept++] = moves_[i];
    }
    moves_.resize(kept);
  }

  const std::vector<Move>& moves() const { return moves_; }

  bool are_independent() const {
    return std::ranges::none_of(moves_,
                                [this](const Move& move) { return find(move.source) >= 0; });
  }

  /// Calls `copy(move)` in an order that is right, and `set_aside(block)` before a ring's first
  /// copy; the copy of that block then has the source kAside.
  static constexpr int64_t kAside = -1;
  template <typename Copy, typename SetAside>
  void run(Copy copy, SetAside set_aside) {
    std::vector<int64_t> readers(moves_.size(), 0);  // of each destination, still to come
    for (const Move& move : moves_) {
      if (const int64_t i = find(move.source); i >= 0) ++readers[i];
    }
    std::vector<bool> is_done(moves_.size(), false);
    const auto follow = [&](int64_t i) {
      // A copy frees its source, which may be another's destination.
      while (i >= 0 && !is_done[i] && readers[i] == 0) {
        copy(moves_[i]);
        is_done[i] = true;
        i = moves_[i].source == kAside ? -1 : find(moves_[i].source);
        if (i >= 0) --readers[i];
      }
    };
    for (size_t i = 0; i < moves_.size(); ++i) follow(static_cast<int64_t>(i));
    for (size_t i = 0; i < moves_.size(); ++i) {
      if (is_done[i]) continue;
      // Only rings are left: each block is read once. Its old content goes aside, to the reader.
      const int64_t block = moves_[i].destination;
      set_aside(block);
      for (size_t j = 0; j < moves_.size(); ++j) {
        if (!is_done[j] && moves_[j].source == block) moves_[j].source = kAside;
      }
      readers[i] = 0;
      follow(static_cast<int64_t>(i));
    }
  }

 private:
  // The copy onto a block; -1 when there is none.
  int64_t find(int64_t destination) const {
    const auto at = std::ranges::lower_bound(moves_, destination, {}, &Move::destination);
    return at != moves_.end() && at->destination == destination ? at - moves_.begin() : -1;
  }

  std::vector<Move> moves_;  // ascending destinations
};

}  // namespace

void copy_blocks(const Isa& isa, const CopyBlocksParams& p, int num_threads) {
  check_ids("sources", p.sources, p.num_copies, p.blocks.num_blocks, "copy_blocks");
  check_ids("destinations", p.destinations, p.num_copies, p.blocks.num_blocks, "copy_blocks");
  OrderedCopies copies(p.sources, p.destinations, p.num_copies);
  if (copies.are_independent()) {
    const Mover mover(isa, p.blocks, p.blocks, p.num_copies);
    mover.run(copies.moves().data(), static_cast<int64_t>(copies.moves().size()), num_threads);
    return;
  }
  BlocksView aside = p.blocks;
  const int64_t block_bytes = num_runs(aside) * aside.run_bytes;
  aside.data = work_memory(block_bytes);
  aside.block_stride = block_bytes;
  int64_t stride = aside.run_bytes;
  for (int32_t dim = aside.num_dims; dim-- > 0;) {
    aside.strides[dim] = stride;
    stride *= aside.sizes[dim];
  }
  const Mover within(isa, p.blocks, p.blocks, 1);
  const Mover out(isa, p.blocks, aside, 1), back(isa, aside, p.blocks, 1);
  copies.run(
      [&](const Move& move) {
        const Move from_aside = {0, move.destination};
        if (move.source == OrderedCopies::kAside) {
          back.run(&from_aside, 1, num_threads);
        } else {
          within.run(&move, 1, num_threads);
        }
      },
      [&](int64_t block) {
        const Move move = {block, 0};
        out.run(&move, 1, num_threads);
      });
}

void gather_blocks(const Isa& isa, const MoveBlocksParams& p, int num_threads) {
  check_ids("block_ids", p.block_ids, p.buffer.num_blocks, p.blocks.num_blocks, "gather_blocks");
  std::vector<Move> moves(p.buffer.num_blocks);
  for (int64_t i = 0; i < p.buffer.num_blocks; ++i) moves[i] = {p.block_ids[i], i};
  const Mover mover(isa, p.blocks, p.buffer, p.buffer.num_blocks);
  mover.run(moves.data(), p.buffer.num_blocks, num_threads);
}

void scatter_blocks(const Isa& isa, const MoveBlocksParams& p, int num_threads) {
  check_ids("block_ids", p.block_ids, p.buffer.num_blocks, p.blocks.num_blocks, "scatter_blocks");
  std::vector<Move> moves(p.buffer.num_blocks);
  for (int64_t i = 0; i < p.buffer.num_blocks; ++i) moves[i] = {i, p.block_ids[i]};
  // Of equal destinations the last counts, on any number of threads.
  std::ranges::stable_sort(moves, {}, &Move::destination);
  const auto last = std::ranges::unique(moves.rbegin(), moves.rend(), {}, &Move::destination);
  moves.erase(moves.begin(), moves.begin() + (moves.rend() - last.begin()));
  const Mover mover(isa, p.buffer, p.blocks, p.buffer.num_blocks);
  mover.run(moves.data(), static_cast<int64_t>(moves.size()), num_threads);
}

}  // namespace pagedkv::cpu

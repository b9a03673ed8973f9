// What is done to whole rows: folding states, turning them into results, writing tokens into pages,
// merging partial results, copying past the caches.

#pragma once

#include "attend.h"
#include "dense_rows.h"

namespace pagedkv::cpu::PAGEDKV_ISA {
namespace {

// `decay` is for what is there, `weight` for what is added.
PAGEDKV_INLINE void add_row(float* into, const float* from, float decay, float weight,
                            int32_t count) {
  for (int32_t d = 0; d < count; d += kLanes) {
    store(into + d, fma(load(into + d), all(decay), load(from + d) * weight));
  }
}

inline void fold(float* into, const float* from, int64_t num_rows, StateLayout layout) {
  const int32_t max_at = layout.acc_floats, sum_at = max_at + 1;
  for (; num_rows > 0; --num_rows, into += layout.stride_floats, from += layout.stride_floats) {
    if (from[max_at] == kMinusInfinity) continue;
    if (into[max_at] == kMinusInfinity) {
      __builtin_memcpy(into, from, (sum_at + 1) * sizeof(float));
      continue;
    }
    const float max = from[max_at] > into[max_at] ? from[max_at] : into[max_at];
    const float decay = exp_of_negative(into[max_at] - max);
    const float weight = exp_of_negative(from[max_at] - max);
    add_row(into, from, decay, weight, layout.acc_floats);
    into[sum_at] = into[sum_at] * decay + from[sum_at] * weight;
    into[max_at] = max;
  }
}

/// Writes one row, undoing the order of load_row.
template <typename Format>
PAGEDKV_INLINE void store_row(const float* from, float factor, int32_t head_dim, bool in_pairs,
                              typename Format::Stored* to) {
  int32_t d = 0;
  if (in_pairs) {
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
      Format::store_pair(to + d, load(from + d) * factor, load(from + d + kLanes) * factor);
    }
  }
  for (; d + kLanes <= head_dim; d += kLanes) Format::store_one(to + d, load(from + d) * factor);
  if (d == head_dim) return;
  typename Format::Stored last[kLanes];  // the rows are padded, the results are not
  Format::store_one(last, load(from + d) * factor);
  __builtin_memcpy(to + d, last, (head_dim - d) * sizeof *last);
}

template <typename Format>
inline void finish_rows(const FinishRows& rows) {
  const AttentionParams& p = *rows.params;
  const int32_t group = p.num_heads / p.num_kv_heads, padded = padded_head_dim(p.head_dim);
  const bool in_pairs = p.page_dtype == p.query_dtype;
  const float* state = rows.states;
  for (int64_t kv_head = rows.kv_head_begin; kv_head < rows.kv_head_end; ++kv_head) {
    for (int32_t t = 0; t < rows.num_tokens; ++t) {
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        float max = state[padded], sum = state[padded + 1], factor = 1.0f;
        bool is_empty = max == kMinusInfinity;
        if (p.sinks) {  // one more state, without values
          const float sink = p.sinks[head];
          if (is_empty) {
            max = sink;
            sum = 1.0f;
          } else if (sink != kMinusInfinity) {
            const float larger = sink > max ? sink : max;
            factor = exp_of_negative(max - larger);
            sum = sum * factor + exp_of_negative(sink - larger);
            max = larger;
          }
        }
        auto* out = static_cast<typename Format::Stored*>(p.out.data) +
                    rows.tokens[t].token * p.out.token_stride + head * p.out.head_stride;
        if (is_empty) {
          __builtin_memset(out, 0, p.head_dim * sizeof *out);
        } else {
          store_row<Format>(state, factor / sum, p.head_dim, in_pairs, out);
        }
        if (p.lse) {
          p.lse[rows.tokens[t].token * p.lse_token_stride + head * p.lse_head_stride] =
              max == kMinusInfinity ? max : max + __builtin_logf(sum);
        }
        state += padded + kAccPadding;
      }
    }
  }
}

inline void finish(const FinishRows& rows) {
  switch (rows.params->query_dtype) {
    case DType::BFloat16:
      return finish_rows<BFloat16>(rows);
    case DType::Float16:
      return finish_rows<Float16>(rows);
    default:
      return finish_rows<Float32>(rows);
  }
}

template <typename From>
PAGEDKV_INLINE Floats load_part(const typename From::Stored* from, int32_t d, int32_t head_dim) {
  if (d + kLanes <= head_dim) return From::load_one(from + d);
  typename From::Stored part[kLanes] = {};
  __builtin_memcpy(part, from + d, (head_dim - d) * sizeof *part);
  return From::load_one(part);
}

// amax / the largest number of the format; NaN when there is a NaN.
template <typename From, typename To>
PAGEDKV_INLINE float scale_for(const typename From::Stored* from, int32_t head_dim) {
  Floats largest = {};
  Ints has_nan = {};
  for (int32_t d = 0; d < head_dim; d += kLanes) {
    const Floats value = load_part<From>(from, d, head_dim);
    has_nan |= value != value;
    largest = max(abs(value), largest);
  }
  largest = floats(bits(largest) | has_nan);
  for (int i = 0; i < kLanes; ++i) {
    if (largest[i] != largest[i]) return __builtin_nanf("");
  }
  return max_of(largest) / To::kLargest;
}

template <typename From, typename To>
inline void quantise_rows_as(const WriteRows& rows) {
  for (int32_t head = 0; head < rows.num_heads; ++head) {
    const auto* from =
        static_cast<const typename From::Stored*>(rows.tokens) + head * rows.tokens_head_stride;
    auto* to = static_cast<typename To::Stored*>(rows.pages) + head * rows.pages_head_stride;
    float scale = 1.0f;
    if (rows.scales) {
      float& stored = rows.scales[head * rows.scales_head_stride];
      if (rows.computes_scales) stored = scale_for<From, To>(from, rows.head_dim);
      scale = stored;
    }
    if (scale == 0.0f) {
      __builtin_memset(to, 0, rows.head_dim);
      continue;
    }
    for (int32_t d = 0; d < rows.head_dim; d += kLanes) {
      const Floats value = load_part<From>(from, d, rows.head_dim) / scale;
      if (d + kLanes <= rows.head_dim) {
        To::store_one(to + d, value);
      } else {
        typename To::Stored part[kLanes];
        To::store_one(part, value);
        __builtin_memcpy(to + d, part, rows.head_dim - d);
      }
    }
  }
}

template <typename From>
inline void quantise_rows_from(const WriteRows& rows, DType page_dtype) {
  if (page_dtype == DType::Int8) return quantise_rows_as<From, Int8>(rows);
  quantise_rows_as<From, Float8>(rows);
}

inline void quantise_rows(const WriteRows& rows, DType token_dtype, DType page_dtype) {
  switch (token_dtype) {
    case DType::BFloat16:
      return quantise_rows_from<BFloat16>(rows, page_dtype);
    case DType::Float16:
      return quantise_rows_from<Float16>(rows, page_dtype);
    default:
      return quantise_rows_from<Float32>(rows, page_dtype);
  }
}

template <typename Format>
inline void merge_row_of(const MergeRow& row, float* sums) {
  float max = kMinusInfinity, total = 0.0f;
  bool has_nan = false;
  for (int64_t i = 0; i < row.num_states; ++i) {
    const float lse = row.lses[i * row.lse_state_stride];
    has_nan |= lse != lse;
    max = lse > max ? lse : max;
  }
  if (has_nan) max = __builtin_nanf("");
  const int32_t padded = padded_head_dim(row.head_dim);
  for (int32_t d = 0; d < padded; d += kLanes) store(sums + d, Floats{});
  for (int64_t i = 0; i < row.num_states; ++i) {
    const float lse = row.lses[i * row.lse_state_stride];
    if (lse == kMinusInfinity) continue;  // what stands beside it may be anything
    const float weight = exp_of_negative(lse - max);
    const auto* from = static_cast<const typename Format::Stored*>(row.outs) + i * row.state_stride;
    for (int32_t d = 0; d < row.head_dim; d += kLanes) {
      store(sums + d, fma(load_part<Format>(from, d, row.head_dim), all(weight), load(sums + d)));
    }
    total += weight;
  }
  auto* out = static_cast<typename Format::Stored*>(row.out);
  const bool is_empty = max == kMinusInfinity;
  store_row<Format>(sums, is_empty ? 1.0f : 1.0f / total, row.head_dim, false, out);
  if (row.lse) *row.lse = is_empty ? max : max + __builtin_logf(total);
}

inline void merge_row(const MergeRow& row, DType dtype, float* scratch) {
  switch (dtype) {
    case DType::BFloat16:
      return merge_row_of<BFloat16>(row, scratch);
    case DType::Float16:
      return merge_row_of<Float16>(row, scratch);
    default:
      return merge_row_of<Float32>(row, scratch);
  }
}

inline void copy_streaming(void* destination, const void* source, int64_t num_bytes) {
#if defined(__SSE2__)
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  const int64_t head = -reinterpret_cast<intptr_t>(to) & 63;
  if (num_bytes < 1024) {
    __builtin_memcpy(to, from, num_bytes);
    return;
  }
  __builtin_memcpy(to, from, head);
  to += head, from += head, num_bytes -= head;
  for (; num_bytes >= 64; num_bytes -= 64, to += 64, from += 64) {
    const __m128i a = load<__m128i>(from), b = load<__m128i>(from + 16);
    const __m128i c = load<__m128i>(from + 32), d = load<__m128i>(from + 48);
    _mm_stream_si128((__m128i*)to, a);
    _mm_stream_si128((__m128i*)(to + 16), b);
    _mm_stream_si128((__m128i*)(to + 32), c);
    _mm_stream_si128((__m128i*)(to + 48), d);
  }
  __builtin_memcpy(to, from, num_bytes);
  _mm_sfence();
#else
  __builtin_memcpy(destination, source, num_bytes);
#endif
}

constexpr Kernels kTable = {scratch_bytes, attend,    fold,           finish,
                            quantise_rows, merge_row, copy_streaming, &kDense};

}  // namespace
}  // namespace pagedkv::cpu::PAGEDKV_ISA

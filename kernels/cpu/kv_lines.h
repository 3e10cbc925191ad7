// Keys and values as they lie in blocks: where a step's lines are, loads of them as floats, memory asked for ahead.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "simd.h"

namespace octavo {

// Keys that are attended to at a time.
constexpr int64_t kStep = 16;

// kStep keys or values of one head.
struct Lines {
  const char* line[kStep];
};

template <int32_t kFormat>
inline Floats load_line(const char* line, int64_t at) {
  if constexpr (kFormat == kBfloat16) return load_bfloat16(line + at * 2);
  if constexpr (kFormat == kFloat16) return load_float16(line + at * 2);
  return load(reinterpret_cast<const float*>(line) + at);
}

// Whether vectors can be loaded from the lines as they are stored.
inline bool is_readable_in_place(const KvPlane& plane) {
  return plane.element_stride == format_bytes(plane.format) && plane.head_dim % kLanes == 0;
}

inline const char* line_of(const KvPlane& plane, int64_t block, int64_t head, int64_t offset) {
  return plane.data + block * plane.block_stride + head * plane.head_stride + offset * plane.token_stride;
}

// Lines behind `count` repeat the last one: they are computed with, and never used.
inline Lines lines_in_place(const KvPlane& plane, const char* first, int64_t count) {
  Lines lines;
  for (int64_t i = 0; i < kStep; ++i) lines.line[i] = first + std::min(i, count - 1) * plane.token_stride;
  return lines;
}

template <int32_t kFormat>
inline void convert_line(const KvPlane& plane, const char* from, float* to) {
  int64_t done = 0;
  if (plane.element_stride == format_bytes(kFormat)) {
    for (; done + kLanes <= plane.head_dim; done += kLanes) store(to + done, load_line<kFormat>(from, done));
  }
  for (; done < plane.head_dim; ++done) to[done] = widen(from + done * plane.element_stride, kFormat);
  for (int64_t end = padded(plane.head_dim); done < end; ++done) to[done] = 0;
}

// The same lines as floats, in `scratch`: [kStep, padded head size].
template <int32_t kFormat>
inline Lines lines_as_floats(const KvPlane& plane, const char* first, int64_t count, float* scratch) {
  int64_t width = padded(plane.head_dim);
  Lines lines;
  for (int64_t i = 0; i < kStep; ++i) {
    if (i < count) convert_line<kFormat>(plane, first + i * plane.token_stride, scratch + i * width);
    lines.line[i] = reinterpret_cast<const char*>(scratch + std::min(i, count - 1) * width);
  }
  return lines;
}

// The lines that come next, asked for while others are computed with. Empty: none.
struct Ahead {
  const char* first = nullptr;
  int64_t stride = 0, bytes = 0;

  void ask(int64_t line) const {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(first + line * stride + at);
  }
};

inline Ahead ahead_of(const KvPlane& plane, int64_t block, int64_t head, int64_t offset) {
  if (plane.element_stride != format_bytes(plane.format)) return {};
  return Ahead{line_of(plane, block, head, offset), plane.token_stride, plane.head_dim * plane.element_stride};
}

}  // namespace octavo

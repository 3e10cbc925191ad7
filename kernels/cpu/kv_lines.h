// Keys and values as they lie in blocks: where a step's lines are, loads of them as floats, memory asked for ahead.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "simd.h"

namespace octavo {

// Keys that are attended to at a time.
constexpr int64_t kStep = 16;

// kStep keys or values of one head. Of codes each line is to be multiplied by its scale, which is left to whoever reads
// them: a score or a weight is one number, a line is many.
struct Lines {
  const char* line[kStep];
  bool is_scaled = false;
  alignas(64) float scale[kStep];
};

template <int32_t kFormat>
inline Floats load_line(const char* line, int64_t at) {
  if constexpr (kFormat == kBfloat16) return load_bfloat16(line + at * 2);
  if constexpr (kFormat == kFloat16) return load_float16(line + at * 2);
  if constexpr (kFormat == kInt8) return load_int8(line + at);
  return load(reinterpret_cast<const float*>(line) + at);
}

// Whether vectors can be loaded from the lines as they are stored.
inline bool is_readable_in_place(const KvPlane& plane) {
  return plane.element_stride == format_bytes(plane.format) && plane.head_dim % kLanes == 0;
}

// Where a line is, and its scale; without scales: null.
struct Place {
  const char *line = nullptr, *scale = nullptr;
};

inline Place place_of(const KvPlane& plane, int64_t block, int64_t head, int64_t offset) {
  Place place{plane.data + block * plane.block_stride + head * plane.head_stride + offset * plane.token_stride};
  if (plane.scales) {
    place.scale = plane.scales + block * plane.scale_block_stride + head * plane.scale_head_stride +
                  offset * plane.scale_token_stride;
  }
  return place;
}

// Lines behind `count` repeat the last one: they are computed with, and never used.
inline int64_t nth_of(int64_t i, int64_t count) { return std::min(i, count - 1); }

inline void read_scales(const KvPlane& plane, Place first, int64_t count, Lines& lines) {
  lines.is_scaled = first.scale != nullptr;
  if (!lines.is_scaled) return;
  for (int64_t i = 0; i < kStep; ++i) {
    std::memcpy(lines.scale + i, first.scale + nth_of(i, count) * plane.scale_token_stride, sizeof(float));
  }
}

inline Lines lines_in_place(const KvPlane& plane, Place first, int64_t count) {
  Lines lines;
  for (int64_t i = 0; i < kStep; ++i) lines.line[i] = first.line + nth_of(i, count) * plane.token_stride;
  read_scales(plane, first, count, lines);
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

// The same lines as floats, in `scratch`: [kStep, padded head size]. Codes stay without their scale.
template <int32_t kFormat>
inline Lines lines_as_floats(const KvPlane& plane, Place first, int64_t count, float* scratch) {
  int64_t width = padded(plane.head_dim);
  Lines lines;
  for (int64_t i = 0; i < kStep; ++i) {
    if (i < count) convert_line<kFormat>(plane, first.line + i * plane.token_stride, scratch + i * width);
    lines.line[i] = reinterpret_cast<const char*>(scratch + nth_of(i, count) * width);
  }
  read_scales(plane, first, count, lines);
  return lines;
}

// The lines that come next, asked for while others are computed with. Empty: none.
struct Ahead {
  Place first;
  int64_t stride = 0, bytes = 0;

  void ask(int64_t line) const {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(first.line + line * stride + at);
    if (line == 0 && first.scale) __builtin_prefetch(first.scale);  // those of a step are next to each other
  }
};

inline Ahead ahead_of(const KvPlane& plane, int64_t block, int64_t head, int64_t offset) {
  if (plane.element_stride != format_bytes(plane.format)) return {};
  return Ahead{place_of(plane, block, head, offset), plane.token_stride, plane.head_dim * plane.element_stride};
}

}  // namespace octavo

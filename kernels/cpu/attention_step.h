// One step of attention: kStep keys of one head meet some queries, one turn of the online softmax for each.
//
// Queries of one run see the same keys of the step and share every load. Each has its own chain of operations, whatever
// the run around it.
#pragma once

#include <cmath>
#include <limits>

#include "kv_lines.h"

namespace octavo {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int kMaxRun = 4;  // queries of one run

// What the softmax of some queries has come to.
struct SoftmaxState {
  float *highest, *sums;  // [rows]
  float* mixed;           // [rows, width of values]
};

// Keys whose sums, and vectors of values whose sums, stay in registers together with a run of kRows.
template <int kRows>
constexpr int kKeysTogether = kLanes == 16 ? (kRows <= 3 ? 8 : 4) : kRows == 1 ? kLanes : kRows <= 3 ? 4 : 2;
template <int kRows>
constexpr int kVectorsTogether = kLanes == 16 ? 4 : kRows == 1 ? 8 : kRows <= 3 ? 4 : 2;

// scores[row, key] = query of the row . line of the key. query: [kRows, width], scores: [kRows, kStep].
template <int32_t kFormat, int kRows>
inline void score(const float* query, const Lines& lines, int64_t width, const Ahead& ahead, float* scores) {
  constexpr int kKeys = kKeysTogether<kRows>;
  for (int64_t begin = 0; begin < kStep; begin += kLanes) {
    Floats sums[kRows][kLanes];
    for (int first = 0; first < kLanes; first += kKeys) {
      Floats own[kRows][kKeys] = {};
      for (int64_t at = 0; at < width; at += kLanes) {
#pragma GCC unroll 8
        for (int i = 0; i < kKeys; ++i) {
          Floats key = load_line<kFormat>(lines.line[begin + first + i], at);
#pragma GCC unroll 4
          for (int row = 0; row < kRows; ++row) own[row][i] = fused(load(query + row * width + at), key, own[row][i]);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kKeys; ++i) {
        ahead.ask(begin + first + i);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) sums[row][first + i] = own[row][i];
      }
    }
    for (int row = 0; row < kRows; ++row) store(scores + row * kStep + begin, sum_each(sums[row]));
  }
}

// Turns scores of keys [first, last) into weights; the others become 0. Returns the highest score of those and `before`.
// A score that is NaN does not count as the highest, and makes `sum` NaN.
inline float weigh(float* scores, int64_t first, int64_t last, float softcap, float before, float& sum) {
  if (softcap > 0) {
    for (int64_t begin = 0; begin < kStep; begin += kLanes) {
      store(scores + begin, hyperbolic_tangent(load(scores + begin) / softcap) * softcap);
    }
  }
  for (int64_t i = 0; i < first; ++i) scores[i] = kNone;
  for (int64_t i = last; i < kStep; ++i) scores[i] = kNone;
  Floats highest = broadcast(before);
  for (int64_t begin = 0; begin < kStep; begin += kLanes) highest = maximum(load(scores + begin), highest);
  float now = max_lanes(highest);
  Floats total{};
  for (int64_t begin = 0; begin < kStep; begin += kLanes) {
    Floats weights = exponential(load(scores + begin) - now);
    store(scores + begin, weights);
    total += weights;
  }
  sum = sum_lanes(total);
  return now;
}

// mixed = mixed * keep + sum over [first, last) of weights[key] * line of the key, for kVectors vectors from `at` on.
template <int32_t kFormat, int kRows, int kVectors>
inline void mix(float* mixed, int64_t width, const float* keep, const float* weights, const Lines& lines, int64_t first,
                int64_t last, int64_t at) {
  Floats sums[kRows][kVectors];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) sums[row][i] = load(mixed + row * width + at + i * kLanes) * keep[row];
  }
  for (int64_t key = first; key < last; ++key) {
    const char* line = lines.line[key];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      Floats value = load_line<kFormat>(line, at + i * kLanes);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        sums[row][i] = fused(broadcast(weights[row * kStep + key]), value, sums[row][i]);
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) store(mixed + row * width + at + i * kLanes, sums[row][i]);
  }
}

// Scores of codes, or weights that codes are to be mixed by, become those of what the codes stand for.
template <int kRows>
inline void rescale(float* numbers, const Lines& lines) {
  if (!lines.is_scaled) return;
  for (int64_t at = 0; at < kStep; at += kLanes) {
    Floats scale = load(lines.scale + at);
    for (int row = 0; row < kRows; ++row) {
      float* own = numbers + row * kStep + at;
      store(own, load(own) * scale);
    }
  }
}

// A step of kRows queries that see keys [first, last) of it. `scores` is scratch, [kRows, kStep].
template <int32_t kFormat, int kRows>
void fold_run(const float* query, int64_t k_width, int64_t v_width, const Lines& keys, const Lines& values,
              int64_t first, int64_t last, float softcap, const Ahead& next_keys, const Ahead& next_values,
              const SoftmaxState& state, float* scores) {
  score<kFormat, kRows>(query, keys, k_width, next_keys, scores);
  rescale<kRows>(scores, keys);
  float keep[kRows];
  for (int row = 0; row < kRows; ++row) {
    float sum, before = state.highest[row], now = weigh(scores + row * kStep, first, last, softcap, before, sum);
    keep[row] = before == now ? 1.0f : std::exp(before - now);
    state.highest[row] = now;
    state.sums[row] = state.sums[row] * keep[row] + sum;
  }
  rescale<kRows>(scores, values);
  constexpr int kVectors = kVectorsTogether<kRows>;
  int64_t at = 0;
  for (int64_t asked = 0; at + kVectors * kLanes <= v_width; at += kVectors * kLanes) {
    for (int64_t end = kStep * (at + kVectors * kLanes) / v_width; asked < end; ++asked) next_values.ask(asked);
    mix<kFormat, kRows, kVectors>(state.mixed, v_width, keep, scores, values, first, last, at);
  }
  for (; at < v_width; at += kLanes) {
    mix<kFormat, kRows, 1>(state.mixed, v_width, keep, scores, values, first, last, at);
  }
}

}  // namespace octavo

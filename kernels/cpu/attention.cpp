// Paged attention: softmax(q K^T) V over the blocks of a table, each read where it lies.
//
//   tile        up to kTileRows / group queries of one row, all heads that share a KV head: they share each load
//   step        kStep keys inside one block: scores of the whole tile, then one turn of the online softmax
//   partition   kPartition positions: a softmax of its own, merged in order of position
//
// Steps and partitions begin at fixed positions of the sequence, so that a query's arithmetic is the same whatever
// stands around it. A unit of work is a tile's partition where there are few tiles, else the whole tile.
// Online softmax: Milakov and Gimelshein 2018 (arXiv:1805.02867); split KV: Dao et al., Flash-Decoding (2023).
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "simd.h"

namespace octavo {
namespace {

constexpr int64_t kStep = 16;
constexpr int64_t kTileRows = 32;
constexpr int64_t kPartition = 512;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// kStep keys or values of one head as floats, wherever and however they are stored.
struct Lines {
  const float* line[kStep];
};

float* allocate(int64_t floats) {
  int64_t bytes = (floats * 4 + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, std::max<int64_t>(bytes, 64));
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<float*>(memory);
}

bool readable_in_place(const KvPlane& plane) {
  return plane.format == kFloat32 && plane.element_stride == 4 && plane.head_dim % kLanes == 0;
}

void convert_line(const KvPlane& plane, const char* from, float* to) {
  int64_t done = 0;
  if (plane.element_stride == format_bytes(plane.format)) {
    if (plane.format == kBfloat16) {
      for (; done + kLanes <= plane.head_dim; done += kLanes) store(to + done, load_bfloat16(from + done * 2));
    } else if (plane.format == kFloat16) {
      for (; done + kLanes <= plane.head_dim; done += kLanes) store(to + done, load_float16(from + done * 2));
    }
  }
  for (; done < plane.head_dim; ++done) to[done] = widen(from + done * plane.element_stride, plane.format);
  for (int64_t end = padded(plane.head_dim); done < end; ++done) to[done] = 0;
}

// Lines behind `count` repeat the last one: they are computed with, and never used.
Lines read_lines(const KvPlane& plane, int64_t block, int64_t head, int64_t first, int64_t count, float* scratch) {
  const char* base = plane.data + block * plane.block_stride + head * plane.head_stride;
  bool in_place = readable_in_place(plane);
  int64_t width = padded(plane.head_dim);
  Lines lines;
  for (int64_t i = 0; i < kStep; ++i) {
    if (i >= count) {
      lines.line[i] = lines.line[count - 1];
      continue;
    }
    const char* from = base + (first + i) * plane.token_stride;
    if (in_place) {
      lines.line[i] = reinterpret_cast<const float*>(from);
    } else {
      convert_line(plane, from, scratch + i * width);
      lines.line[i] = scratch + i * width;
    }
  }
  return lines;
}

void prefetch_lines(const KvPlane& plane, int64_t block, int64_t head, int64_t first, int64_t count) {
  if (plane.element_stride != format_bytes(plane.format)) return;
  const char* base = plane.data + block * plane.block_stride + head * plane.head_stride;
  int64_t bytes = plane.head_dim * plane.element_stride;
  for (int64_t i = first; i < first + count; ++i) {
    const char* from = base + i * plane.token_stride;
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
  }
}

// scores[i] = query . line i
inline void score(const float* query, const Lines& lines, int64_t width, float* scores) {
  for (int64_t begin = 0; begin < kStep; begin += kLanes) {
    Floats sums[kLanes] = {};
    for (int64_t at = 0; at < width; at += kLanes) {
      Floats part = load(query + at);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) sums[i] += part * load(lines.line[begin + i] + at);
    }
    store(scores + begin, sum_each(sums));
  }
}

// mixed = mixed * keep + sum over [first, last) of weights[i] * line i
template <int kVectors>
inline void mix(float* mixed, float keep, const float* weights, const Lines& lines, int64_t first, int64_t last,
                int64_t at) {
  Floats sums[kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) sums[i] = load(mixed + at + i * kLanes) * keep;
  for (int64_t key = first; key < last; ++key) {
    Floats weight = broadcast(weights[key]);
    const float* line = lines.line[key] + at;
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) sums[i] += weight * load(line + i * kLanes);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) store(mixed + at + i * kLanes, sums[i]);
}

inline void mix_all(float* mixed, float keep, const float* weights, const Lines& lines, int64_t first, int64_t last,
                    int64_t width) {
  int64_t at = 0;
  for (; at + 8 * kLanes <= width; at += 8 * kLanes) mix<8>(mixed, keep, weights, lines, first, last, at);
  for (; at + 4 * kLanes <= width; at += 4 * kLanes) mix<4>(mixed, keep, weights, lines, first, last, at);
  for (; at < width; at += kLanes) mix<1>(mixed, keep, weights, lines, first, last, at);
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

}  // namespace

struct AttentionWork::Tile {
  int64_t row, first_token, num_queries;
  int64_t first_position;  // of its first query, in the sequence
  int64_t first_partition, num_partitions;
  int64_t first_unit, num_units;
  int64_t last_position() const { return first_position + num_queries - 1; }
};

struct AttentionWork::Scratch {
  float *query, *state, *part, *k, *v, *scores;
};

// State of a tile: [rows] highest score, [rows] sum of weights, [rows, v width] mixed values.
int64_t AttentionWork::state_size(const AttentionLayer& layer) const {
  return max_rows_ * (2 + padded(layer.v.head_dim));
}

AttentionWork::AttentionWork(const Rows& rows, const AttentionLayer& widest, int num_threads) : rows_(rows) {
  group_ = widest.num_heads / widest.num_kv_heads;
  max_kv_heads_ = widest.num_kv_heads;
  int64_t queries = std::max<int64_t>(1, kTileRows / group_);
  max_rows_ = queries * group_;
  max_state_ = state_size(widest);
  std::vector<Tile> tiles;
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    int64_t begin = rows.query_starts[row], count = rows.query_starts[row + 1] - begin;
    int64_t computed = rows.context_lengths[row] - count;
    for (int64_t at = 0; at < count; at += queries) {
      Tile tile{row, begin + at, std::min(queries, count - at), computed + at, 0, 0, 0, 0};
      int64_t first = widest.window ? std::max<int64_t>(0, tile.first_position - widest.window + 1) : 0;
      tile.first_partition = first / kPartition;
      tile.num_partitions = tile.last_position() / kPartition + 1 - tile.first_partition;
      tiles.push_back(tile);
    }
  }
  num_tiles_ = static_cast<int64_t>(tiles.size());
  bool split = num_tiles_ * max_kv_heads_ < 4 * num_threads;
  bool any_split = false;
  for (Tile& tile : tiles) {
    tile.first_unit = num_units_;
    tile.num_units = split ? tile.num_partitions : 1;
    any_split |= tile.num_units > 1;
    num_units_ += tile.num_units;
  }
  tiles_ = new Tile[tiles.size()];
  std::copy(tiles.begin(), tiles.end(), tiles_);
  tile_of_unit_ = new int64_t[num_units_];
  for (int64_t i = 0; i < num_tiles_; ++i) {
    std::fill_n(tile_of_unit_ + tiles_[i].first_unit, tiles_[i].num_units, i);
  }
  if (any_split) partials_ = allocate(max_kv_heads_ * num_units_ * max_state_);
  done_ = new std::atomic<int32_t>[num_tiles_ * max_kv_heads_]();
  int64_t k_width = padded(widest.k.head_dim), v_width = padded(widest.v.head_dim);
  scratch_size_ = max_rows_ * (k_width + kStep) + 2 * max_state_ + kStep * (k_width + v_width) + 64;
  scratch_size_ = (scratch_size_ + 15) / 16 * 16;
  scratch_ = allocate(scratch_size_ * num_threads);
}

AttentionWork::~AttentionWork() {
  delete[] tiles_;
  delete[] tile_of_unit_;
  delete[] done_;
  std::free(partials_);
  std::free(scratch_);
}

void AttentionWork::attend(const AttentionLayer& layer, HeadsIn query, HeadsOut out, int thread,
                           std::atomic<int64_t>& next) {
  int64_t k_width = padded(layer.k.head_dim), v_width = padded(layer.v.head_dim);
  Scratch scratch;
  scratch.query = scratch_ + thread * scratch_size_;
  scratch.scores = scratch.query + max_rows_ * k_width;
  scratch.k = scratch.scores + max_rows_ * kStep;
  scratch.v = scratch.k + kStep * k_width;
  scratch.state = scratch.v + kStep * v_width;
  scratch.part = scratch.state + max_state_;
  int64_t all = num_units_ * layer.num_kv_heads;
  for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < all;) {
    attend_unit(layer, query, out, scratch, unit);
  }
}

void AttentionWork::attend_unit(const AttentionLayer& layer, HeadsIn query, HeadsOut out, Scratch& scratch,
                                int64_t unit) {
  int64_t head = unit % layer.num_kv_heads, unit_of_head = unit / layer.num_kv_heads;
  int64_t tile_index = tile_of_unit_[unit_of_head];
  const Tile& tile = tiles_[tile_index];
  int64_t width = padded(layer.k.head_dim);
  for (int64_t row = 0; row < tile.num_queries * group_; ++row) {
    int64_t token = tile.first_token + row / group_;
    const float* from = query.data + token * query.token_stride + (head * group_ + row % group_) * query.head_stride;
    float* to = scratch.query + row * width;
    for (int64_t i = 0; i < layer.k.head_dim; ++i) to[i] = from[i] * layer.scale;
    for (int64_t i = layer.k.head_dim; i < width; ++i) to[i] = 0;
  }
  if (tile.num_units == 1) {
    fold_partition(layer, tile, head, tile.first_partition, scratch, scratch.state);
    for (int64_t i = 1; i < tile.num_partitions; ++i) {
      fold_partition(layer, tile, head, tile.first_partition + i, scratch, scratch.part);
      merge(layer, tile, scratch.state, scratch.part);
    }
    finish(layer, tile, head, scratch.state, out);
    return;
  }
  float* states = partials_ + head * num_units_ * max_state_;
  int64_t nth = unit_of_head - tile.first_unit;
  fold_partition(layer, tile, head, tile.first_partition + nth, scratch, states + unit_of_head * max_state_);
  auto& done = done_[head * num_tiles_ + tile_index];
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < tile.num_units) return;
  done.store(0, std::memory_order_relaxed);  // the last one merges, in order, and leaves it for the next layer
  float* first = states + tile.first_unit * max_state_;
  for (int64_t i = 1; i < tile.num_units; ++i) merge(layer, tile, first, first + i * max_state_);
  finish(layer, tile, head, first, out);
}

// The softmax of the keys in one partition, from nothing.
void AttentionWork::fold_partition(const AttentionLayer& layer, const Tile& tile, int64_t head, int64_t partition,
                                   Scratch& scratch, float* state) {
  int64_t k_width = padded(layer.k.head_dim), v_width = padded(layer.v.head_dim);
  int64_t num_rows = tile.num_queries * group_, block_size = rows_.block_size;
  const int32_t* table = rows_.tables + tile.row * rows_.table_width;
  float *highest = state, *sums = state + max_rows_, *mixed = state + 2 * max_rows_;
  std::fill_n(highest, num_rows, kNone);
  std::fill_n(sums, num_rows, 0.0f);
  std::fill_n(mixed, num_rows * v_width, 0.0f);
  int64_t begin = partition * kPartition, end = std::min(begin + kPartition, tile.last_position() + 1);
  int64_t seen = layer.window ? std::max<int64_t>(0, tile.first_position - layer.window + 1) : 0;
  for (int64_t position = begin; position < end;) {
    int64_t offset = position % block_size, block = table[position / block_size];
    // A step ends at a multiple of kStep in its block, at the block's end, or at the partition's.
    int64_t step_end = std::min({position - offset + (offset / kStep + 1) * kStep, position - offset + block_size,
                                 begin + kPartition});
    int64_t count = step_end - position;
    if (step_end <= seen) {
      position = step_end;
      continue;
    }
    if (step_end < end) {
      int64_t next_block = table[step_end / block_size], next_offset = step_end % block_size;
      int64_t next_count = std::min({kStep, block_size - next_offset, end - step_end});
      prefetch_lines(layer.k, next_block, head, next_offset, next_count);
      prefetch_lines(layer.v, next_block, head, next_offset, next_count);
    }
    Lines keys = read_lines(layer.k, block, head, offset, count, scratch.k);
    Lines values = read_lines(layer.v, block, head, offset, count, scratch.v);
    for (int64_t row = 0; row < num_rows; ++row) {
      int64_t query = tile.first_position + row / group_;
      int64_t last = std::min(count, query + 1 - position);
      int64_t first = layer.window ? std::max<int64_t>(0, query - layer.window + 1 - position) : 0;
      if (first >= last) continue;
      float* scores = scratch.scores + row * kStep;
      score(scratch.query + row * k_width, keys, k_width, scores);
      float sum, now = weigh(scores, first, last, layer.softcap, highest[row], sum);
      float keep = highest[row] == now ? 1.0f : std::exp(highest[row] - now);
      highest[row] = now;
      sums[row] = sums[row] * keep + sum;
      mix_all(mixed + row * v_width, keep, scores, values, first, last, v_width);
    }
    position = step_end;
  }
}

void AttentionWork::merge(const AttentionLayer& layer, const Tile& tile, float* into, const float* part) const {
  int64_t width = padded(layer.v.head_dim), num_rows = tile.num_queries * group_;
  for (int64_t row = 0; row < num_rows; ++row) {
    float ours = into[row], theirs = part[row];
    if (theirs == kNone) continue;
    float* mixed = into + 2 * max_rows_ + row * width;
    const float* other = part + 2 * max_rows_ + row * width;
    float highest = ours != ours || theirs != theirs ? std::nanf("") : std::max(ours, theirs);
    float keep = ours == kNone ? 0.0f : std::exp(ours - highest), add = std::exp(theirs - highest);
    into[row] = highest;
    into[max_rows_ + row] = into[max_rows_ + row] * keep + part[max_rows_ + row] * add;
    for (int64_t at = 0; at < width; at += kLanes) {
      store(mixed + at, load(mixed + at) * keep + load(other + at) * add);
    }
  }
}

void AttentionWork::finish(const AttentionLayer& layer, const Tile& tile, int64_t head, const float* state,
                           HeadsOut out) const {
  int64_t width = padded(layer.v.head_dim);
  for (int64_t row = 0; row < tile.num_queries * group_; ++row) {
    int64_t token = tile.first_token + row / group_;
    float* to = out.data + token * out.token_stride + (head * group_ + row % group_) * out.head_stride;
    const float* mixed = state + 2 * max_rows_ + row * width;
    float share = 1.0f / state[max_rows_ + row];
    for (int64_t i = 0; i < layer.v.head_dim; ++i) to[i] = mixed[i] * share;
  }
}

void write_token(const KvPlane& plane, int64_t num_kv_heads, int64_t block, int64_t offset, const float* heads,
                 int64_t head_stride) {
  char* base = plane.data + block * plane.block_stride + offset * plane.token_stride;
  for (int64_t head = 0; head < num_kv_heads; ++head) {
    const float* from = heads + head * head_stride;
    char* to = base + head * plane.head_stride;
    if (plane.format == kFloat32 && plane.element_stride == 4) {
      std::memcpy(to, from, plane.head_dim * 4);
    } else {
      for (int64_t i = 0; i < plane.head_dim; ++i) narrow(to + i * plane.element_stride, from[i], plane.format);
    }
  }
}

}  // namespace octavo

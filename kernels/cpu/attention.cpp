// Paged attention: softmax(q K^T) V over the blocks of a table, each read where it lies.
//
//   tile        up to kTileRows / group queries of one row
//   unit        a tile, some KV heads, and a partition or all of them: what one thread takes
//   step        kStep keys inside one block: scores of the tile, then one turn of the online softmax, head by head, so
//               that a block is read from its beginning to its end
//   partition   kPartition positions: a softmax of its own, merged in order of position
//
// Steps and partitions begin at fixed positions of the sequence, so that a query's arithmetic is the same whatever
// stands around it. Partitions are units of their own where there are few tiles.
// Online softmax: Milakov and Gimelshein 2018 (arXiv:1805.02867); split KV: Dao et al., Flash-Decoding (2023).
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "attention_step.h"
#include "kv_lines.h"
#include "simd.h"

namespace octavo {
namespace {

constexpr int64_t kTileRows = 32;
constexpr int64_t kPartition = 512;
constexpr int64_t kUnitsPerThread = 4;  // at least, where there is so much to do

float* allocate(int64_t floats) {
  int64_t bytes = (floats * 4 + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, std::max<int64_t>(bytes, 64));
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<float*>(memory);
}

// Calls with the format, or the length of a run, as a constant.
template <typename Do>
inline void with_format(int32_t format, Do&& run) {
  if (format == kFloat32) return run(std::integral_constant<int32_t, kFloat32>{});
  if (format == kBfloat16) return run(std::integral_constant<int32_t, kBfloat16>{});
  if (format == kInt8) return run(std::integral_constant<int32_t, kInt8>{});
  run(std::integral_constant<int32_t, kFloat16>{});
}

template <typename Do>
inline void with_run(int64_t length, Do&& run) {
  static_assert(kMaxRun == 4);
  if (length == 4) return run(std::integral_constant<int, 4>{});
  if (length == 3) return run(std::integral_constant<int, 3>{});
  if (length == 2) return run(std::integral_constant<int, 2>{});
  run(std::integral_constant<int, 1>{});
}

}  // namespace

struct AttentionWork::Tile {
  int64_t row, first_token, num_queries;
  int64_t first_position;  // of its first query, in the sequence
  int64_t first_partition, num_partitions;
  int64_t last_position() const { return first_position + num_queries - 1; }
};

struct AttentionWork::Unit {
  const Tile* tile;
  int64_t first_head, num_heads;  // KV heads
  int64_t first_partition, num_partitions;
  int64_t first_sibling, num_siblings;  // units of the same tile and heads, by partition
};

// The softmax of a unit's rows: by KV head, then by query, then by head of the group.
struct AttentionWork::State : SoftmaxState {};

struct AttentionWork::Scratch {
  float *query, *scores, *k, *v, *state, *part;
};

// A step of one head.
struct AttentionWork::HeadStep {
  const Tile* tile;
  int64_t position, count;          // of the keys
  Place first_key, first_value;
  Ahead next_keys, next_values;
  const float* query;
  SoftmaxState state;
};

AttentionWork::AttentionWork(const Rows& rows, const AttentionLayer& shape, int num_threads)
    : rows_(rows),
      group_(shape.num_heads / shape.num_kv_heads),
      k_width_(padded(shape.k.head_dim)),
      v_width_(padded(shape.v.head_dim)),
      max_rows_(std::max(kTileRows, group_)),
      state_size_(max_rows_ * (2 + v_width_)) {
  cut_tiles(shape);
  cut_units(shape, num_threads);
  done_.reset(new std::atomic<int32_t>[units_.size()]());
  scratch_size_ = max_rows_ * k_width_ + kMaxRun * kStep + 2 * state_size_ + kStep * (k_width_ + v_width_);
  scratch_size_ = (scratch_size_ + 15) / 16 * 16;
  scratch_.reset(allocate(scratch_size_ * num_threads));
}

AttentionWork::~AttentionWork() = default;

void AttentionWork::cut_tiles(const AttentionLayer& shape) {
  int64_t queries = std::max<int64_t>(1, kTileRows / group_);
  for (int64_t row = 0; row < rows_.num_rows; ++row) {
    int64_t begin = rows_.query_starts[row], count = rows_.query_starts[row + 1] - begin;
    int64_t computed = rows_.context_lengths[row] - count;
    for (int64_t at = 0; at < count; at += queries) {
      Tile tile{row, begin + at, std::min(queries, count - at), computed + at, 0, 0};
      int64_t first = shape.window ? std::max<int64_t>(0, tile.first_position - shape.window + 1) : 0;
      tile.first_partition = first / kPartition;
      tile.num_partitions = tile.last_position() / kPartition + 1 - tile.first_partition;
      tiles_.push_back(tile);
    }
  }
}

// As many heads to a unit as leave enough units: a block is read in one go then.
void AttentionWork::cut_units(const AttentionLayer& shape, int num_threads) {
  int64_t pieces = static_cast<int64_t>(tiles_.size()) * shape.num_kv_heads, enough = kUnitsPerThread * num_threads;
  bool split = pieces < enough;
  bool is_any_split = false;
  for (const Tile& tile : tiles_) {
    int64_t most = std::max<int64_t>(1, kTileRows / (tile.num_queries * group_));
    int64_t heads = std::max<int64_t>(1, std::min({most, pieces / enough, shape.num_kv_heads}));
    int64_t partitions = split ? 1 : tile.num_partitions;
    for (int64_t head = 0; head < shape.num_kv_heads; head += heads) {
      int64_t first = static_cast<int64_t>(units_.size()), siblings = tile.num_partitions / partitions;
      for (int64_t nth = 0; nth < siblings; ++nth) {
        units_.push_back(Unit{&tile, head, std::min(heads, shape.num_kv_heads - head), tile.first_partition + nth,
                              partitions, first, siblings});
      }
      is_any_split |= siblings > 1;
    }
  }
  if (is_any_split) partials_.reset(allocate(static_cast<int64_t>(units_.size()) * state_size_));
}

void AttentionWork::attend(const AttentionLayer& layer, HeadsIn query, HeadsOut out, int thread,
                           std::atomic<int64_t>& next) {
  Scratch scratch;
  scratch.query = scratch_.get() + thread * scratch_size_;
  scratch.scores = scratch.query + max_rows_ * k_width_;
  scratch.k = scratch.scores + kMaxRun * kStep;
  scratch.v = scratch.k + kStep * k_width_;
  scratch.state = scratch.v + kStep * v_width_;
  scratch.part = scratch.state + state_size_;
  int64_t all = static_cast<int64_t>(units_.size());
  for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < all;) {
    attend_unit(layer, query, out, scratch, unit);
  }
}

void AttentionWork::attend_unit(const AttentionLayer& layer, HeadsIn query, HeadsOut out, const Scratch& scratch,
                                int64_t index) {
  const Unit& unit = units_[index];
  load_queries(layer, unit, query, scratch.query);
  if (unit.num_siblings == 1) {
    State state = state_at(scratch.state), part = state_at(scratch.part);
    fold_partition(layer, unit, unit.first_partition, scratch, state);
    for (int64_t i = 1; i < unit.num_partitions; ++i) {
      fold_partition(layer, unit, unit.first_partition + i, scratch, part);
      merge(unit, state, part);
    }
    finish(layer, unit, state, out);
    return;
  }
  fold_partition(layer, unit, unit.first_partition, scratch, state_at(partials_.get() + index * state_size_));
  auto& done = done_[unit.first_sibling];
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < unit.num_siblings) return;
  done.store(0, std::memory_order_relaxed);  // the last one merges, in order, and leaves it for the next layer
  float* first = partials_.get() + unit.first_sibling * state_size_;
  for (int64_t i = 1; i < unit.num_siblings; ++i) merge(unit, state_at(first), state_at(first + i * state_size_));
  finish(layer, unit, state_at(first), out);
}

int64_t AttentionWork::num_rows(const Unit& unit) const { return unit.num_heads * unit.tile->num_queries * group_; }

AttentionWork::State AttentionWork::state_at(float* memory) const {
  return State{{memory, memory + max_rows_, memory + 2 * max_rows_}};
}

// [heads of the unit, queries, group, k width], scaled
void AttentionWork::load_queries(const AttentionLayer& layer, const Unit& unit, HeadsIn query, float* to) const {
  for (int64_t head = unit.first_head; head < unit.first_head + unit.num_heads; ++head) {
    for (int64_t row = 0; row < unit.tile->num_queries * group_; ++row, to += k_width_) {
      int64_t token = unit.tile->first_token + row / group_;
      const float* from = query.data + token * query.token_stride + (head * group_ + row % group_) * query.head_stride;
      for (int64_t i = 0; i < layer.k.head_dim; ++i) to[i] = from[i] * layer.scale;
      for (int64_t i = layer.k.head_dim; i < k_width_; ++i) to[i] = 0;
    }
  }
}

// The softmax of the keys in one partition, from nothing.
void AttentionWork::fold_partition(const AttentionLayer& layer, const Unit& unit, int64_t partition,
                                   const Scratch& scratch, const State& state) const {
  const Tile& tile = *unit.tile;
  int64_t block_size = rows_.block_size;
  std::fill_n(state.highest, num_rows(unit), kNone);
  std::fill_n(state.sums, num_rows(unit), 0.0f);
  std::fill_n(state.mixed, num_rows(unit) * v_width_, 0.0f);
  int64_t begin = partition * kPartition, end = std::min(begin + kPartition, tile.last_position() + 1);
  int64_t seen = layer.window ? std::max<int64_t>(0, tile.first_position - layer.window + 1) : 0;
  for (int64_t position = begin, step_end; position < end; position = step_end) {
    int64_t offset = position % block_size;
    // A step ends at a multiple of kStep in its block, at the block's end, or at the partition's.
    step_end = std::min({position - offset + (offset / kStep + 1) * kStep, position - offset + block_size,
                         begin + kPartition});
    if (step_end > seen) fold_step(layer, unit, position, step_end, end, scratch, state);
  }
}

// Keys [position, step_end) of a partition that ends at `end`, head by head.
void AttentionWork::fold_step(const AttentionLayer& layer, const Unit& unit, int64_t position, int64_t step_end,
                              int64_t end, const Scratch& scratch, const State& state) const {
  const int32_t* table = rows_.tables + unit.tile->row * rows_.table_width;
  int64_t size = rows_.block_size, block = table[position / size], offset = position % size;
  int64_t rows = unit.tile->num_queries * group_;
  for (int64_t nth = 0; nth < unit.num_heads; ++nth) {
    int64_t head = unit.first_head + nth, done = nth * rows;
    HeadStep step{};
    step.tile = unit.tile, step.position = position, step.count = step_end - position;
    step.first_key = place_of(layer.k, block, head, offset);
    step.first_value = place_of(layer.v, block, head, offset);
    if (nth + 1 < unit.num_heads) {
      step.next_keys = ahead_of(layer.k, block, head + 1, offset);
      step.next_values = ahead_of(layer.v, block, head + 1, offset);
    } else if (step_end < end) {
      step.next_keys = ahead_of(layer.k, table[step_end / size], unit.first_head, step_end % size);
      step.next_values = ahead_of(layer.v, table[step_end / size], unit.first_head, step_end % size);
    }
    step.query = scratch.query + done * k_width_;
    step.state = {state.highest + done, state.sums + done, state.mixed + done * v_width_};
    fold_head(layer, step, scratch);
  }
}

// Few queries take keys and values as they lie; for many they become floats first, once.
void AttentionWork::fold_head(const AttentionLayer& layer, const HeadStep& step, const Scratch& scratch) const {
  bool is_in_place = is_readable_in_place(layer.k) && is_readable_in_place(layer.v);
  bool is_few = layer.k.format == kFloat32 || step.tile->num_queries * group_ <= kMaxRun;
  with_format(layer.k.format, [&](auto format) {
    constexpr int32_t kFormat = decltype(format)::value;
    if (is_in_place && is_few) {
      Lines keys = lines_in_place(layer.k, step.first_key, step.count);
      return fold_lines<kFormat>(layer, step, keys, lines_in_place(layer.v, step.first_value, step.count),
                                 scratch.scores);
    }
    Lines keys = lines_as_floats<kFormat>(layer.k, step.first_key, step.count, scratch.k);
    Lines values = lines_as_floats<kFormat>(layer.v, step.first_value, step.count, scratch.v);
    fold_lines<kFloat32>(layer, step, keys, values, scratch.scores);
  });
}

// Queries that see the same keys of the step go together.
template <int32_t kFormat>
void AttentionWork::fold_lines(const AttentionLayer& layer, const HeadStep& step, const Lines& keys,
                               const Lines& values, float* scores) const {
  int64_t rows = step.tile->num_queries * group_;
  auto last_of = [&](int64_t row) {
    return std::min(step.count, step.tile->first_position + row / group_ + 1 - step.position);
  };
  auto first_of = [&](int64_t row) {
    if (!layer.window) return int64_t{0};
    return std::max<int64_t>(0, step.tile->first_position + row / group_ - layer.window + 1 - step.position);
  };
  Ahead next_keys = step.next_keys, next_values = step.next_values;
  for (int64_t row = 0, run; row < rows; row += run) {
    int64_t first = first_of(row), last = last_of(row);
    run = 1;
    if (first >= last) continue;
    while (run < kMaxRun && row + run < rows && first_of(row + run) == first && last_of(row + run) == last) ++run;
    SoftmaxState state{step.state.highest + row, step.state.sums + row, step.state.mixed + row * v_width_};
    with_run(run, [&](auto length) {
      fold_run<kFormat, decltype(length)::value>(step.query + row * k_width_, k_width_, v_width_, keys, values, first,
                                                 last, layer.softcap, next_keys, next_values, state, scores);
    });
    next_keys = next_values = {};  // asked for
  }
}

void AttentionWork::merge(const Unit& unit, const State& into, const State& part) const {
  for (int64_t row = 0; row < num_rows(unit); ++row) {
    float ours = into.highest[row], theirs = part.highest[row];
    if (theirs == kNone) continue;
    float* mixed = into.mixed + row * v_width_;
    const float* other = part.mixed + row * v_width_;
    float highest = ours != ours || theirs != theirs ? std::nanf("") : std::max(ours, theirs);
    float keep = ours == kNone ? 0.0f : std::exp(ours - highest), add = std::exp(theirs - highest);
    into.highest[row] = highest;
    into.sums[row] = into.sums[row] * keep + part.sums[row] * add;
    for (int64_t at = 0; at < v_width_; at += kLanes) {
      store(mixed + at, load(mixed + at) * keep + load(other + at) * add);
    }
  }
}

void AttentionWork::finish(const AttentionLayer& layer, const Unit& unit, const State& state, HeadsOut out) const {
  int64_t rows = unit.tile->num_queries * group_;
  for (int64_t row = 0; row < num_rows(unit); ++row) {
    int64_t token = unit.tile->first_token + row % rows / group_;
    int64_t head = (unit.first_head + row / rows) * group_ + row % group_;
    float* to = out.data + token * out.token_stride + head * out.head_stride;
    const float* mixed = state.mixed + row * v_width_;
    float share = 1.0f / state.sums[row];
    for (int64_t i = 0; i < layer.v.head_dim; ++i) to[i] = mixed[i] * share;
  }
}

}  // namespace octavo

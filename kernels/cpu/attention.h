// Paged attention of one layer: what is read, and the two parts that a team of threads shares out among itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace octavo {

struct Lines;  // see kv_lines.h

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// K or V of one layer in the arena; int8: codes, and a float by which each token's head is to be multiplied. Strides in
// bytes.
struct KvPlane {
  char* data;
  int64_t block_stride, head_stride, token_stride, element_stride;
  int64_t head_dim;
  char* scales;  // null but for int8
  int64_t scale_block_stride, scale_head_stride, scale_token_stride;
  int32_t format;
  int32_t unused;
};

// The rows of one step: chunks and decodes, packed.
struct Rows {
  int64_t num_rows, num_tokens, block_size, table_width;
  const int64_t* query_starts;     // [num_rows + 1]
  const int64_t* context_lengths;  // [num_rows], this step's tokens included
  const int32_t* tables;           // [num_rows, table_width]
  const int64_t* write_blocks;     // [num_tokens]
  const int64_t* write_offsets;    // [num_tokens]
};

struct AttentionLayer {
  KvPlane k, v;
  int64_t num_heads, num_kv_heads;
  int64_t window;  // keys at positions > query - window are seen; 0: all
  float scale;
  float softcap;  // 0: none
};

// [num_tokens, num_heads, head_dim] float32, dimensions next to each other. Strides in elements.
struct HeadsIn {
  const float* data;
  int64_t token_stride, head_stride;
};

struct HeadsOut {
  float* data;
  int64_t token_stride, head_stride;
};

// Writes one token's K or V into its block.
void write_token(const KvPlane& plane, int64_t num_kv_heads, int64_t block, int64_t offset, const float* heads,
                 int64_t head_stride);

// How one step's attention is cut into units of work, and where partial results lie. The cut decides who computes a
// thing, never how: a row's result has the same bits in every batch, chunk and number of threads.
class AttentionWork {
 public:
  // Allocates; to be made outside of the team.
  AttentionWork(const Rows& rows, const AttentionLayer& shape, int num_threads);
  ~AttentionWork();
  AttentionWork(const AttentionWork&) = delete;

  // One member's share: units are taken from the counter until none is left. All members see a fresh counter.
  void attend(const AttentionLayer& layer, HeadsIn query, HeadsOut out, int thread, std::atomic<int64_t>& next);

 private:
  struct Tile;  // some queries of one row
  struct Unit;  // what one thread takes of it
  struct State;
  struct Scratch;
  struct HeadStep;

  void cut_tiles(const AttentionLayer& shape);
  void cut_units(const AttentionLayer& shape, int num_threads);
  void attend_unit(const AttentionLayer& layer, HeadsIn query, HeadsOut out, const Scratch& scratch, int64_t index);
  void load_queries(const AttentionLayer& layer, const Unit& unit, HeadsIn query, float* to) const;
  void fold_partition(const AttentionLayer& layer, const Unit& unit, int64_t partition, const Scratch& scratch,
                      const State& state) const;
  void fold_step(const AttentionLayer& layer, const Unit& unit, int64_t position, int64_t step_end, int64_t end,
                 const Scratch& scratch, const State& state) const;
  void fold_head(const AttentionLayer& layer, const HeadStep& step, const Scratch& scratch) const;
  template <int32_t kFormat>
  void fold_lines(const AttentionLayer& layer, const HeadStep& step, const Lines& keys, const Lines& values,
                  float* scores) const;
  int64_t num_rows(const Unit& unit) const;
  State state_at(float* memory) const;
  void merge(const Unit& unit, const State& into, const State& part) const;
  void finish(const AttentionLayer& layer, const Unit& unit, const State& state, HeadsOut out) const;

  const Rows& rows_;
  int64_t group_;           // heads that share a KV head
  int64_t k_width_, v_width_;  // of a line as vectors
  int64_t max_rows_;        // of a unit: queries by heads
  int64_t state_size_, scratch_size_;  // floats
  std::vector<Tile> tiles_;
  std::vector<Unit> units_;
  std::unique_ptr<std::atomic<int32_t>[]> done_;  // [units], at the first of a tile's: how many of them are computed
  std::unique_ptr<float, Free> partials_;   // [units, state_size], where a tile's partitions are units
  std::unique_ptr<float, Free> scratch_;    // [threads, scratch_size]
};

}  // namespace octavo

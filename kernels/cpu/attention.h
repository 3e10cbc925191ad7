// Paged attention of one layer: what is read, and the two parts that a team of threads shares out among itself.
#pragma once

#include <atomic>
#include <cstdint>

namespace octavo {

// K or V of one layer in the arena. Strides in bytes.
struct KvPlane {
  char* data;
  int64_t block_stride, head_stride, token_stride, element_stride;
  int64_t head_dim;
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
  AttentionWork(const Rows& rows, const AttentionLayer& widest, int num_threads);
  ~AttentionWork();
  AttentionWork(const AttentionWork&) = delete;

  // One member's share: units are taken from the counter until none is left. All members see a fresh counter.
  void attend(const AttentionLayer& layer, HeadsIn query, HeadsOut out, int thread, std::atomic<int64_t>& next);

 private:
  struct Tile;  // some queries of one row
  struct Scratch;
  void attend_unit(const AttentionLayer& layer, HeadsIn query, HeadsOut out, Scratch& scratch, int64_t unit);
  void fold_partition(const AttentionLayer& layer, const Tile& tile, int64_t head, int64_t partition, Scratch& scratch,
                      float* state);
  void merge(const AttentionLayer& layer, const Tile& tile, float* into, const float* part) const;
  void finish(const AttentionLayer& layer, const Tile& tile, int64_t head, const float* state, HeadsOut out) const;
  int64_t state_size(const AttentionLayer& layer) const;

  const Rows& rows_;
  int64_t group_, max_rows_, max_kv_heads_;
  int64_t num_tiles_ = 0, num_units_ = 0;  // units of one KV head
  Tile* tiles_ = nullptr;
  int64_t* tile_of_unit_ = nullptr;
  int64_t max_state_;
  float* partials_ = nullptr;          // [num_kv_heads, num_units, max_state], where a tile has several units
  std::atomic<int32_t>* done_ = nullptr;  // [num_kv_heads, num_tiles], units of the tile that are computed
  float* scratch_ = nullptr;
  int64_t scratch_size_;
};

}  // namespace octavo

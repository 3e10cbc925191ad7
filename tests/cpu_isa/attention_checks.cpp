// Paged attention in every KV format, head size, window and softcap: close to double precision; the same bits for a row
// alone, for a prompt in chunks, and for any number of threads.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "checks.h"
#include "interface.h"
#include "reference.h"

namespace checks {
namespace {

constexpr int64_t kWidth = 64;  // blocks of a table

struct Shape {
  int64_t num_heads, num_kv_heads, k_dim, v_dim, block_size;
  int format;
  int64_t window;
  float softcap;
  std::string name() const {
    static const char* const kNames[] = {"float32", "bfloat16", "float16", "int8"};
    return "attention, KV in " + std::string(kNames[format]) + ", heads " + std::to_string(num_heads) + "/" +
           std::to_string(num_kv_heads) + " of " + std::to_string(k_dim) + "/" + std::to_string(v_dim) + ", blocks of " +
           std::to_string(block_size) + (window ? ", window " + std::to_string(window) : "") +
           (softcap > 0 ? ", softcap" : "");
  }
};

// Whole sequences; which part of them a step computes is the step's.
struct Sequence {
  std::vector<int32_t> table;
  std::vector<float> query, key, value;  // [positions, heads * dim]
};

struct Part {
  int64_t sequence, first, count;
};

class Arena {
 public:
  Arena(const Shape& shape, const std::vector<int64_t>& lengths) : shape_(shape) {
    Random random(lengths.size() + shape.k_dim);
    int64_t blocks = kWidth * static_cast<int64_t>(lengths.size());
    std::vector<int32_t> order(blocks);
    for (int64_t i = 0; i < blocks; ++i) order[i] = static_cast<int32_t>(i);
    for (int64_t i = blocks - 1; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
    for (size_t i = 0; i < lengths.size(); ++i) {
      Sequence sequence;
      sequence.table.assign(order.begin() + i * kWidth, order.begin() + (i + 1) * kWidth);
      sequence.query = random.numbers(lengths[i] * shape.num_heads * shape.k_dim, 2.0f);
      sequence.key = random.numbers(lengths[i] * shape.num_kv_heads * shape.k_dim);
      sequence.value = random.numbers(lengths[i] * shape.num_kv_heads * shape.v_dim);
      sequences.push_back(sequence);
    }
    k_.assign(blocks * shape.num_kv_heads * shape.block_size * shape.k_dim * bytes(), 0x7f);
    v_.assign(blocks * shape.num_kv_heads * shape.block_size * shape.v_dim * bytes(), 0x7f);
    k_scales_.assign(blocks * shape.num_kv_heads * shape.block_size, NAN);
    v_scales_ = k_scales_;
  }

  // [tokens, num_heads * v_dim]. Writes the parts' keys and values, then attends.
  std::vector<float> attend(const std::vector<Part>& parts, int threads) {
    std::vector<int64_t> starts{0}, contexts, write_blocks, write_offsets;
    std::vector<int32_t> tables;
    std::vector<float> query, key, value;
    for (const Part& part : parts) {
      const Sequence& sequence = sequences[part.sequence];
      starts.push_back(starts.back() + part.count);
      contexts.push_back(part.first + part.count);
      tables.insert(tables.end(), sequence.table.begin(), sequence.table.end());
      for (int64_t at = part.first; at < part.first + part.count; ++at) {
        write_blocks.push_back(sequence.table[at / shape_.block_size]);
        write_offsets.push_back(at % shape_.block_size);
      }
      append(query, sequence.query, part, shape_.num_heads * shape_.k_dim);
      append(key, sequence.key, part, shape_.num_kv_heads * shape_.k_dim);
      append(value, sequence.value, part, shape_.num_kv_heads * shape_.v_dim);
    }
    int64_t tokens = starts.back();
    octavo::Rows rows{static_cast<int64_t>(parts.size()), tokens, shape_.block_size, kWidth, starts.data(),
                      contexts.data(), tables.data(), write_blocks.data(), write_offsets.data()};
    octavo::AttentionLayer layer{plane(k_, k_scales_, shape_.k_dim), plane(v_, v_scales_, shape_.v_dim), shape_.num_heads,
                                 shape_.num_kv_heads, shape_.window, scale(), shape_.softcap};
    std::vector<float> out(tokens * shape_.num_heads * shape_.v_dim, NAN);
    octavo::HeadsIn q{query.data(), shape_.num_heads * shape_.k_dim, shape_.k_dim};
    octavo::HeadsIn k{key.data(), shape_.num_kv_heads * shape_.k_dim, shape_.k_dim};
    octavo::HeadsIn v{value.data(), shape_.num_kv_heads * shape_.v_dim, shape_.v_dim};
    octavo::HeadsOut to{out.data(), shape_.num_heads * shape_.v_dim, shape_.v_dim};
    void* work = octavo_attention_begin(&rows, &layer, threads);
    octavo_attention(&rows, &layer, work, &q, &k, &v, &to, threads);
    octavo_attention_end(work);
    return out;
  }

  // The largest error of a part's results, as a share of the values' range, 1.
  double error(const Part& part, const float* out) const {
    const Sequence& sequence = sequences[part.sequence];
    std::vector<float> key = as_stored(sequence.key, shape_.k_dim), value = as_stored(sequence.value, shape_.v_dim);
    double worst = 0;
    int64_t step = part.count > 8 ? part.count / 5 : 1;
    for (int64_t nth = part.count - 1; nth >= 0; nth -= step) {
      for (int64_t head = 0; head < shape_.num_heads; ++head) {
        int64_t kv_head = head / (shape_.num_heads / shape_.num_kv_heads), size = part.first + nth + 1;
        std::vector<const float*> keys, values;
        for (int64_t at = 0; at < size; ++at) {
          keys.push_back(key.data() + (at * shape_.num_kv_heads + kv_head) * shape_.k_dim);
          values.push_back(value.data() + (at * shape_.num_kv_heads + kv_head) * shape_.v_dim);
        }
        const float* from = sequence.query.data() + ((size - 1) * shape_.num_heads + head) * shape_.k_dim;
        std::vector<double> right =
            reference::attention(std::vector<double>(from, from + shape_.k_dim).data(), keys, values, shape_.k_dim,
                                 shape_.v_dim, scale(), shape_.softcap, shape_.window);
        for (int64_t d = 0; d < shape_.v_dim; ++d) {
          double off = std::fabs(out[(nth * shape_.num_heads + head) * shape_.v_dim + d] - right[d]);
          if (!(off <= worst)) worst = off;
        }
      }
    }
    return worst;
  }

  // Whether the keys and values of a part lie where they belong, as what rounding makes of them.
  bool stored_right(const Part& part) const {
    const Sequence& sequence = sequences[part.sequence];
    bool right = true;
    for (int64_t at = part.first; at < part.first + part.count; ++at) {
      for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
        int64_t block = sequence.table[at / shape_.block_size];
        int64_t line = (block * shape_.num_kv_heads + head) * shape_.block_size + at % shape_.block_size;
        right &= line_is(k_, k_scales_, line, sequence.key.data() + (at * shape_.num_kv_heads + head) * shape_.k_dim,
                         shape_.k_dim);
        right &= line_is(v_, v_scales_, line, sequence.value.data() + (at * shape_.num_kv_heads + head) * shape_.v_dim,
                         shape_.v_dim);
      }
    }
    return right;
  }

  std::vector<Sequence> sequences;

 private:
  int64_t bytes() const { return octavo::format_bytes(shape_.format); }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.k_dim)); }

  octavo::KvPlane plane(std::vector<char>& data, std::vector<float>& scales, int64_t size) const {
    int64_t token = size * bytes(), head = token * shape_.block_size, tokens = 4 * shape_.block_size;
    char* own = shape_.format == reference::kInt8 ? reinterpret_cast<char*>(scales.data()) : nullptr;
    return octavo::KvPlane{data.data(), head * shape_.num_kv_heads, head, token, bytes(), size, own,
                           tokens * shape_.num_kv_heads, tokens, 4, shape_.format, 0};
  }

  std::vector<float> as_stored(const std::vector<float>& lines, int64_t size) const {
    std::vector<float> made;
    for (size_t at = 0; at < lines.size(); at += size) {
      std::vector<float> line = reference::stored_line(lines.data() + at, size, shape_.format);
      made.insert(made.end(), line.begin(), line.end());
    }
    return made;
  }

  static void append(std::vector<float>& to, const std::vector<float>& from, const Part& part, int64_t size) {
    to.insert(to.end(), from.begin() + part.first * size, from.begin() + (part.first + part.count) * size);
  }

  bool line_is(const std::vector<char>& data, const std::vector<float>& scales, int64_t nth, const float* values,
               int64_t size) const {
    const char* line = data.data() + nth * size * bytes();
    if (shape_.format == reference::kFloat32) return !std::memcmp(line, values, size * 4);
    if (shape_.format == reference::kInt8) {
      reference::Codes codes = reference::codes_of(values, size);
      return !std::memcmp(line, codes.codes.data(), size) && scales[nth] == codes.scale;
    }
    for (int64_t i = 0; i < size; ++i) {
      uint16_t bits = shape_.format == reference::kBfloat16 ? reference::bfloat16_bits(values[i])
                                                            : reference::float16_bits(values[i]);
      if (std::memcmp(line + i * 2, &bits, 2)) return false;
    }
    return true;
  }

  Shape shape_;
  std::vector<char> k_, v_;
  std::vector<float> k_scales_, v_scales_;  // [blocks, KV heads, tokens], int8 only
};

bool same(const std::vector<float>& one, const float* other) {
  return !std::memcmp(one.data(), other, one.size() * sizeof(float));
}

void check(const Shape& shape) {
  Arena arena(shape, {530, 77, 1, 50});
  int64_t width = shape.num_heads * shape.v_dim;
  const std::vector<Part> before{{0, 0, 529}, {1, 0, 40}, {3, 0, 49}};
  const std::vector<Part> step{{0, 529, 1}, {1, 40, 37}, {2, 0, 1}, {3, 49, 1}};  // decodes and a chunk
  arena.attend(before, 2);
  std::vector<float> out = arena.attend(step, 1);
  double worst = 0;
  bool alone = true, right = true;
  int64_t token = 0;
  for (const Part& part : step) {
    double error = arena.error(part, out.data() + token * width);
    if (!(error <= worst)) worst = error;
    alone &= same(arena.attend({part}, 1), out.data() + token * width);
    token += part.count;
    right &= arena.stored_right(part);
  }
  for (const Part& part : before) right &= arena.stored_right(part);
  report_close(shape.name(), worst, 1e-6);
  report_same(shape.name() + ": what was stored", right);
  report_same(shape.name() + ": each row alone", alone);
  report_same(shape.name() + ": three threads", same(arena.attend(step, 3), out.data()));
  std::vector<float> whole = arena.attend({{1, 0, 77}}, 1);
  bool chunks = same(arena.attend({{1, 3, 50}}, 1), whole.data() + 3 * width);
  for (int64_t at : {0, 17, 76}) chunks &= same(arena.attend({{1, at, 1}}, 2), whole.data() + at * width);
  report_same(shape.name() + ": chunks", chunks);
}

}  // namespace

void check_attention() {
  using namespace reference;
  for (int format : {kFloat32, kBfloat16, kFloat16, kInt8}) {
    check({4, 2, 64, 64, 16, format, 0, 0});
    check({3, 1, 80, 80, 16, format, 0, 0});
    check({2, 2, 128, 128, 32, format, 40, 0});
    check({4, 1, 256, 256, 16, format, 0, 0});
    check({2, 2, 64, 128, 24, format, 0, 30.0f});
    check({2, 1, 20, 36, 10, format, 100, 20.0f});  // neither heads nor blocks a whole number of vectors
  }
}

}  // namespace checks

// The same results by plain loops, in double precision where the kernels have floats. Knows nothing of vectors: it is
// compiled for the oldest processor, and includes nothing of the kernels.
#pragma once

#include <cstdint>
#include <vector>

namespace reference {

enum Format { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3 };  // the kernels' numbers

uint16_t bfloat16_bits(float value);
uint16_t float16_bits(float value);
float widened(uint16_t bits, int format);
// What is left of a value that was stored in this format, no int8.
float stored(float value, int format);

// One token's keys or values of one head as int8 has them.
struct Codes {
  std::vector<int8_t> codes;
  float scale;
};
Codes codes_of(const float* line, int64_t size);
// The same as numbers, in any format.
std::vector<float> stored_line(const float* line, int64_t size, int format);

// code * scale of each `group` numbers of a row, codes of -127..127.
std::vector<double> rounded(const float* row, int64_t size, int64_t group);

// One layer's weights as the kernels see them; blocks stay what they are.
struct Weights {
  int64_t num_outputs, num_inputs;
  std::vector<double> values;
  std::vector<float> bias;   // empty: none
  int64_t input_group;       // inputs that share a scale; 0: they are no codes
};
Weights weights_as_stored(const std::vector<float>& weights, const std::vector<float>& bias, int64_t num_outputs,
                          int64_t num_inputs, int format, bool blocks);

// [num_outputs]; magnitude: the same with all terms positive.
std::vector<double> product(const Weights& weights, const float* row, std::vector<double>* magnitude = nullptr);

// One query of one head. keys, values: [num_positions] pointers to head_dim floats; the query is at the last position.
std::vector<double> attention(const double* query, const std::vector<const float*>& keys,
                              const std::vector<const float*>& values, int64_t k_dim, int64_t v_dim, double scale,
                              double softcap, int64_t window);

struct Layer {
  Weights qkv, o, gate_up, down;  // gate_up: first all gates
  std::vector<float> before_attention, after_attention, before_mlp, after_mlp, query, key;  // empty: no norm
};

struct Model {
  int64_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, window;
  bool gelu;
  int kv_format;
  double epsilon, scale, attention_softcap, logits_softcap, embedding_scale;
  std::vector<float> embedding;  // [vocabulary, hidden_size]
  std::vector<Layer> layers;
  std::vector<float> last;
  Weights head;
  const float *cos, *sin;  // [positions, head_dim]
};

// Logits of every token of a sequence from its start: [tokens][vocabulary].
std::vector<std::vector<double>> decode(const Model& model, const std::vector<int64_t>& tokens);

}  // namespace reference

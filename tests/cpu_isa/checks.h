// What every check uses: numbers from a counter, and a line of output per thing that held or did not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace checks {

// SplitMix64 (Steele, Lea and Flood 2014): the same numbers on every processor.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t word = state_ += 0x9e3779b97f4a7c15u;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
    return word ^ (word >> 31);
  }
  int64_t below(int64_t bound) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(bound)); }
  // Of [-1, 1).
  float number() { return static_cast<float>(static_cast<int64_t>(bits() >> 40) - (1 << 23)) / (1 << 23); }
  std::vector<float> numbers(int64_t count, float scale = 1.0f) {
    std::vector<float> made(count);
    for (float& value : made) value = number() * scale;
    return made;
  }

 private:
  uint64_t state_;
};

// error: the largest, as a share of what rounding is measured by. NaN fails.
void report_close(const std::string& name, double error, double allowed);
void report_same(const std::string& name, bool same);

void check_formats();
void check_linear();
void check_attention();
void check_decoder();

}  // namespace checks

// Vectors of floats in GCC's vector extensions, as wide as the processor that is compiled for, and what the kernels
// do with them: loads from every number format of a KV block, exp, tanh, sums across lanes.
//
// Every function is a fixed sequence of operations per lane, so that a result never depends on what else is computed.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include <immintrin.h>

namespace octavo {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4), may_alias));
typedef float FloatsUnaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Words __attribute__((vector_size(kLanes * 4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));

// Number formats of KV blocks and of weights, as Python names them by number.
enum Format : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3 };

inline int64_t format_bytes(int32_t format) { return format == kFloat32 ? 4 : format == kInt8 ? 1 : 2; }

inline int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

inline Floats broadcast(float value) { return Floats{} + value; }
inline Floats load(const float* from) { return *reinterpret_cast<const FloatsUnaligned*>(from); }
inline void store(float* to, Floats value) { *reinterpret_cast<FloatsUnaligned*>(to) = value; }
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// a * b + c in one rounding where the processor has that. Written out where several forms of a loop must agree to the
// bit: which products of a sum the compiler contracts may differ from form to form.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline Floats load_bfloat16(const void* from) {
#if defined(__AVX512F__)
  Words bits = (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  Words bits = (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#else
  Words bits = __builtin_convertvector(*static_cast<const Halves*>(from), Words);
#endif
  return reinterpret_cast<Floats>(bits << 16);
}

inline float widen_bfloat16(uint16_t bits) {
  uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// To nearest, ties to even; a NaN stays one.
inline uint16_t round_bfloat16(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((word >> 16) | 0x40);
  return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1)) >> 16);
}

inline float widen_float16(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}

inline uint16_t round_float16(float value) {
  _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

// Written out: GCC 12 takes the bytes of a converted vector apart, one by one.
inline Floats load_int8(const void* from) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
#else
  return __builtin_convertvector(__builtin_convertvector(*static_cast<const Bytes*>(from), Words), Floats);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
inline __m128i pack_halves(Words words) {
  __m256i wide = reinterpret_cast<__m256i>(words);
  return _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}
#endif

// Numbers that fit, in fewer bits; such as do not fit become others that do. Written out for the same reason.
inline void store_codes(int8_t* to, Words words) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(words)));
#elif defined(__AVX2__)
  __m128i halves = pack_halves(words);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(halves, halves));
#else
  *reinterpret_cast<Bytes*>(to) = __builtin_convertvector(words, Bytes);
#endif
}

inline void store_codes(int16_t* to, Words words) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(words)));
#elif defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), pack_halves(words));
#else
  typedef int16_t Shorts __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
  *reinterpret_cast<Shorts*>(to) = __builtin_convertvector(words, Shorts);
#endif
}

inline Floats load_float16(const void* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from))));
#else
  Floats wide;
  for (int lane = 0; lane < kLanes; ++lane) wide[lane] = widen_float16(static_cast<const uint16_t*>(from)[lane]);
  return wide;
#endif
}

inline float widen(const char* from, int32_t format) {
  if (format == kFloat32) return *reinterpret_cast<const float*>(from);
  if (format == kInt8) return *reinterpret_cast<const int8_t*>(from);  // a code; its scale is elsewhere
  uint16_t bits = *reinterpret_cast<const uint16_t*>(from);
  return format == kBfloat16 ? widen_bfloat16(bits) : widen_float16(bits);
}

inline void narrow(char* to, float value, int32_t format) {
  if (format == kFloat32) {
    *reinterpret_cast<float*>(to) = value;
  } else {
    *reinterpret_cast<uint16_t*>(to) = format == kBfloat16 ? round_bfloat16(value) : round_float16(value);
  }
}

// Lane i of the result: lane i ^ kStride. The numbers of lanes must be constants.
template <int kStride, int... kLane>
inline Floats swap_lanes(Floats vector, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(vector, vector, (kLane ^ kStride)...);
}

// Lanes without the bit kStride from a, the others from b: once as they are, once with their lanes swapped; the sum.
template <int kStride, int... kLane>
inline Floats add_swapped(Floats a, Floats b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, (kLane & kStride ? kLanes + kLane : kLane)...) +
         __builtin_shufflevector(a, b, (kLane & kStride ? kLanes + (kLane ^ kStride) : (kLane ^ kStride))...);
}

using EveryLane = std::make_integer_sequence<int, kLanes>;

// Sums the lanes of kLanes vectors: lane i of the result is the sum of vector i. Overwrites its argument.
template <int kStride = 1>
inline Floats sum_each(Floats* vectors) {
  if constexpr (kStride == kLanes) {
    return vectors[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / kStride / 2; ++i) {
      vectors[i] = add_swapped<kStride>(vectors[2 * i], vectors[2 * i + 1], EveryLane{});
    }
    return sum_each<kStride * 2>(vectors);
  }
}

template <int kStride = kLanes / 2>
inline float sum_lanes(Floats vector) {
  if constexpr (kStride == 0) {
    return vector[0];
  } else {
    return sum_lanes<kStride / 2>(vector + swap_lanes<kStride>(vector, EveryLane{}));
  }
}

template <int kStride = kLanes / 2>
inline float max_lanes(Floats vector) {
  if constexpr (kStride == 0) {
    return vector[0];
  } else {
    return max_lanes<kStride / 2>(maximum(vector, swap_lanes<kStride>(vector, EveryLane{})));
  }
}

// e^x within 2 units in the last place, 0 below -87; NaN stays NaN. Cephes' single-precision polynomial (S. Moshier).
inline Floats exponential(Floats x) {
  Floats clamped = x < -87.5f ? broadcast(-87.5f) : x;
  clamped = clamped > 88.0f ? broadcast(88.0f) : clamped;
  Floats shifted = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
  Floats whole = shifted - 12582912.0f;
  Floats rest = clamped - whole * 0.693359375f;
  rest = rest - whole * -2.12194440e-4f;
  Floats sum = broadcast(1.9875691500e-4f);
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * (rest * rest) + rest + 1.0f;
  Words power = (reinterpret_cast<Words>(shifted) - 0x4B400000 + 127) << 23;
  Floats result = sum * reinterpret_cast<Floats>(power);
  result = x < -87.0f ? Floats{} : result;
  return x != x ? x : result;
}

inline Floats hyperbolic_tangent(Floats x) {
  Floats magnitude = x < 0.0f ? -x : x;
  Floats power = exponential(magnitude * -2.0f);
  Floats result = (1.0f - power) / (1.0f + power);
  return x < 0.0f ? -result : result;
}

}  // namespace octavo

// SIMD vectors of the accumulation type, with loads and stores that convert from and to the four storage types.
// Uses GCC and Clang vector extensions: the same source compiles to SSE, AVX2, AVX-512 or NEON.
// Everything is in an unnamed namespace: the linker must never merge code compiled for different instruction sets.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};

template <typename Acc>
struct VectorOf {
  static constexpr int lanes = kVectorBytes / sizeof(Acc);
  typedef Acc type __attribute__((vector_size(kVectorBytes)));
};
using Floats = VectorOf<float>::type;
using Doubles = VectorOf<double>::type;
typedef uint16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Each load() reads one full vector; `from` may be unaligned.
inline Floats load(const float* from) {
  Floats vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

inline Doubles load(const double* from) {
  Doubles vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

inline Words load_words(const void* from) {
#if defined(__AVX512F__)  // GCC splits the conversion below in two; masked for the reason in load() of Half
  const __m256i packed = _mm256_loadu_si256(static_cast<const __m256i*>(from));
  return bit_cast<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, packed));
#elif defined(__AVX2__)
  return bit_cast<Words>(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
#else
  Shorts shorts;
  std::memcpy(&shorts, from, sizeof shorts);
  return __builtin_convertvector(shorts, Words);
#endif
}

inline Floats load(const BFloat16* from) { return bit_cast<Floats>(load_words(from) << 16); }

inline Floats load(const Half* from) {
#if defined(__AVX512F__)
  // The masked form: GCC 12 warns about the undefined register inside the plain one.
  return bit_cast<Floats>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  return bit_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  const Words word = load_words(from);
  const Words magnitude = word & 0x7fff;
  // The exponent bias of Half is 112 less: multiplying by 2^112 corrects normal and subnormal numbers alike.
  Words bits = bit_cast<Words>(bit_cast<Floats>(magnitude << 13) * 0x1p112f);
  bits |= (magnitude >= 0x7c00) & (0x7f800000 | (magnitude << 13));  // infinity and NaN
  return bit_cast<Floats>(bits | ((word & 0x8000) << 16));
#endif
}

inline void store(float from, float* to) { *to = from; }
inline void store(double from, double* to) { *to = from; }

inline void store(float from, BFloat16* to) {
  const uint32_t bits = bit_cast<uint32_t>(from);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  to->bits = nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // nearest, ties to even
}

inline void store(float from, Half* to) {
  const uint32_t bits = bit_cast<uint32_t>(from), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    to->bits = static_cast<uint16_t>(sign | 0x7e00);
  } else if (magnitude >= 0x477ff000) {  // rounds to 65536 or more
    to->bits = static_cast<uint16_t>(sign | 0x7c00);
  } else if (magnitude < 0x38800000) {  // subnormal: adding 0.5 shifts the bits into place and rounds them
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    to->bits = static_cast<uint16_t>(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000));
  } else {
    to->bits = static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
  }
}

// Each store() writes one full vector; `to` may be unaligned.
inline void store(const Floats& from, float* to) { std::memcpy(to, &from, sizeof from); }
inline void store(const Doubles& from, double* to) { std::memcpy(to, &from, sizeof from); }

inline void store(const Floats& from, BFloat16* to) {
  const Words bits = bit_cast<Words>(from), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words nan = bit_cast<Words>((bits & 0x7fffffff) > 0x7f800000);  // all bits set for a NaN
  const Words words = (rounded & ~nan) | (0x7fc0 & nan);
#if defined(__AVX512F__)
  const __m256i shorts = _mm512_maskz_cvtepi32_epi16(0xffff, bit_cast<__m512i>(words));
#elif defined(__AVX2__)  // packs within 128-bit lanes: the upper four shorts are in the third 64 bits
  const __m256i halves = _mm256_packus_epi32(bit_cast<__m256i>(words), bit_cast<__m256i>(words));
  const __m128i shorts = _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08));
#else
  const Shorts shorts = __builtin_convertvector(words, Shorts);
#endif
  std::memcpy(to, &shorts, sizeof shorts);
}

inline void store(const Floats& from, Half* to) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, bit_cast<__m512>(from), _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &halves, sizeof halves);
#elif defined(__F16C__)
  const __m128i halves = _mm256_cvtps_ph(bit_cast<__m256>(from), _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &halves, sizeof halves);
#else
  for (unsigned i = 0; i < sizeof from / sizeof from[0]; ++i) store(from[i], to + i);
#endif
}

// Reads the first `count` lanes and zeros the others.
template <typename T>
inline auto load_part(const T* from, int64_t count) {
  T lanes[VectorOf<typename Accumulator<T>::type>::lanes] = {};
  std::memcpy(lanes, from, static_cast<size_t>(count) * sizeof(T));
  return load(lanes);
}

// Writes the first `count` lanes.
template <typename T, typename Vector>
inline void store_part(const Vector& vector, T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(vector[i], to + i);
}

// Adds the two halves, recursively: adding lane by lane would take four times as long.
template <typename Vector>
inline auto sum_lanes(const Vector& vector) {
  using Number = std::remove_cv_t<std::remove_reference_t<decltype(vector[0])>>;
  constexpr int lanes = sizeof vector / sizeof(Number);
  if constexpr (lanes == 2) {
    return vector[0] + vector[1];
  } else {
    typedef Number Part __attribute__((vector_size(sizeof(Number) * lanes / 2)));
    Part halves[2];
    std::memcpy(halves, &vector, sizeof vector);
    return sum_lanes(Part(halves[0] + halves[1]));
  }
}

}  // namespace

// Vectors of floats, whose lanes are those of the instruction set, and what the kernels compute with them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <omp.h>
#if defined __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int W = WIDTH;
typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));

struct Bfloat16 { uint16_t bits; };
struct Full { static constexpr int n = W; };
struct Part { int n; };

inline V splat(float x) { return V{} + x; }
inline I iota() { I v; for (int i = 0; i < W; i++) v[i] = i; return v; }

inline V load(const float* p, Full) { V v; std::memcpy(&v, p, sizeof v); return v; }
#if defined __AVX512F__
inline V load(const float* p, Part k) { return (V)_mm512_maskz_loadu_ps(__mmask16((1 << k.n) - 1), p); }
#elif defined __AVX2__
inline V load(const float* p, Part k) { return (V)_mm256_maskload_ps(p, (__m256i)(iota() < k.n)); }
#else
inline V load(const float* p, Part k) { V v{}; for (int i = 0; i < k.n; i++) v[i] = p[i]; return v; }
#endif
inline void store(float* p, V v, Full) { std::memcpy(p, &v, sizeof v); }
#if defined __AVX512F__
inline void store(float* p, V v, Part k) { _mm512_mask_storeu_ps(p, __mmask16((1 << k.n) - 1), (__m512)v); }
#elif defined __AVX2__
inline void store(float* p, V v, Part k) { _mm256_maskstore_ps(p, (__m256i)(iota() < k.n), (__m256)v); }
#else
inline void store(float* p, V v, Part k) { for (int i = 0; i < k.n; i++) p[i] = v[i]; }
#endif

template <class K> inline V load(const Bfloat16* p, K k) {
    U u{};
    for (int i = 0; i < k.n; i++) u[i] = uint32_t(p[i].bits) << 16;
    return (V)u;
}
template <class K> inline void store(Bfloat16* p, V v, K k) {
    U u = (U)v;
    u = v == v ? u + 0x7FFF + ((u >> 16) & 1) : U{} + 0x7FC00000u;  // to nearest, ties to even
    for (int i = 0; i < k.n; i++) p[i].bits = uint16_t(u[i] >> 16);
}

inline V keep(V v, Full) { return v; }  // zero in lanes that hold no element
inline V keep(V v, Part k) { return iota() < k.n ? v : V{}; }

template <size_t N> inline V polynomial(V x, const float (&c)[N]) {
    V out = x * c[0] + c[1];
    for (size_t i = 2; i < N; i++) out = out * x + c[i];
    return out;
}

constexpr float LN2 = 0.6931471805599453f, LN2_HIGH = 0.693145751953125f, LN2_LOW = 1.4286068203e-6f;
constexpr int THREE_QUARTERS = 0x3F400000, ONE = 0x3F800000, EXPONENT = int(0xFF800000);
// Weighted minimax fits; within 2 ulp.
constexpr float LOG1P[] = {0.05413185432553291f, -0.12067317217588425f, 0.14983916282653809f, -0.1682281792163849f,
                           0.19977077841758728f, -0.24993441998958588f, 0.3333354890346527f, -0.5000005960464478f};
constexpr float EXPM1[] = {0.0013882494531571865f, 0.00836664717644453f, 0.04166720435023308f, 0.16666541993618011f,
                           0.4999999701976776f};

inline V log_of(I k, V m) { return __builtin_convertvector(k, V) * (LN2 * 0x1p-23f) + (polynomial(m, LOG1P) * (m * m) + m); }

// log(1 + a), a >= 0: 1 + a = 2^k * (1 + m), -1/4 <= m < 1/2, m formed from a itself, so that a small a keeps its bits.
// Beyond 1e37 it is infinite: what overflows must be seen.
inline V log1p(V a) {
    I k = ((I)(1 + a) - THREE_QUARTERS) & EXPONENT;
    V scale = (V)(ONE - k);
    V log = log_of(k, a * scale + (scale - 1));
    return a > 1e37f ? splat(INFINITY) : log;
}

inline V log(V q) {
    I k = ((I)q - THREE_QUARTERS) & EXPONENT;
    return log_of(k, q * (V)(ONE - k) - 1);
}

// exp(u) - 1 = 2^n * (exp(r) - 1) + (2^n - 1), u = n * ln 2 + r; infinite beyond exp(88)
inline V expm1(V u) {
    u = u < -87.0f ? splat(-87.0f) : u;
    V n = (u * (1 / LN2) + 12582912.0f) - 12582912.0f;
    V r = (u - n * LN2_HIGH) - n * LN2_LOW;
    V scale = (V)(((U)__builtin_convertvector(n, I) << 23) + ONE);
    V grown = (polynomial(r, EXPM1) * (r * r) + r) * scale + (scale - 1);
    return u > 88.0f ? splat(INFINITY) : grown;
}

// To 1 ulp; what it is for 0, infinity and NaN is nobody's business.
#if defined __AVX512F__
inline V reciprocal(V x) {  // one step of Newton's: a division takes several times as long
    V guess = (V)_mm512_rcp14_ps((__m512)x);
    return guess * (1 - x * guess) + guess;
}
#else
inline V reciprocal(V x) { return 1 / x; }
#endif

inline V absolute(V h) { return (V)((I)h & 0x7FFFFFFF); }
inline V signed_as(V h, V magnitude) { return (V)((I)magnitude ^ ((I)h & int(0x80000000))); }

// Doubles come half as many at a time: compilers keep longer vectors in memory.
constexpr int HALF = W / 2;
typedef double D __attribute__((vector_size(8 * HALF)));
typedef float Few __attribute__((vector_size(4 * HALF)));

inline D widened(V v, int from) {
    Few few;
    std::memcpy(&few, reinterpret_cast<const char*>(&v) + 4 * from, sizeof few);
    return __builtin_convertvector(few, D);
}

// Halves onto halves: as exact as one after the other, and not as slow.
template <int N, class S, class F> inline S folded(S* lanes, F both) {
    if constexpr (N > 1) {
        for (int i = 0; i < N / 2; i++) lanes[i] = both(lanes[i], lanes[i + N / 2]);
        return folded<N / 2>(lanes, both);
    } else {
        return lanes[0];
    }
}
template <class F> inline float folded(V vector, F both) {
    float lanes[W];
    std::memcpy(lanes, &vector, sizeof lanes);
    return folded<W>(lanes, both);
}
inline double total_of(D vector) {
    double lanes[HALF];
    std::memcpy(lanes, &vector, sizeof lanes);
    return folded<HALF>(lanes, [](double a, double b) { return a + b; });
}
inline double total_of(V v) { return total_of(widened(v, 0) + widened(v, HALF)); }

// Of one quantity over a set, whose vectors' lanes are added up in the end, or (COLUMNS) a set a lane.
template <bool COLUMNS> struct Sum {
    V part{};
    D low{}, high{};
    void add(V v) { part += v; }
    void flush() { low += widened(part, 0), high += widened(part, HALF), part = V{}; }
    void finish(double scale) {
        if (COLUMNS) low *= scale, high *= scale;
        else low[0] = total_of(low + high) * scale;
    }
    double operator[](int lane) const { return lane < HALF ? low[lane] : high[lane - HALF]; }
    V value() const {
        if (!COLUMNS) return splat(float(low[0]));
        Few few[] = {__builtin_convertvector(low, Few), __builtin_convertvector(high, Few)};
        V v;
        std::memcpy(&v, few, sizeof v);
        return v;
    }
};

template <class... Sums> inline void flush(Sums&... sums) { (sums.flush(), ...); }
template <class... Sums> inline void finish(double scale, Sums&... sums) { (sums.finish(scale), ...); }

}  // namespace

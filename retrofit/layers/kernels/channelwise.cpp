// Elementwise maps with a scale and a shift a channel, or a sample and channel, and the sums that their derivatives need:
// what proxy-normalized activations and migrated group normalization are made of (activations.py, migrated_group_norm.py).
//
// A tensor is `blocks` of `rows` by `channels` with channels innermost (LAST), or rows of `length` elements, one a sample
// and channel. Tables have an entry a row modulo `period`, or (LAST) a channel, `step` apart from block to block. Sums
// have an entry a row, or a channel of each block; lanes are summed in float over at most 256 vectors, then in double.

#include "vectors.h"

namespace {

struct Place { int64_t rows, length, period, channels, blocks, step; int threads; };

struct Identity {
    V operator()(V x) const { return x; }
    V slope(V) const { return splat(1); }
};
struct Clamp {  // ReLU, ReLU6, Hardtanh
    float low, high;
    V operator()(V x) const { x = x < low ? splat(low) : x; return x > high ? splat(high) : x; }
    V slope(V x) const { return (x > low) & (x < high) ? splat(1) : V{}; }
};
struct Leaky {
    float negative, unused;
    V operator()(V x) const { return x > 0 ? x : x * negative; }
    V slope(V x) const { return x > 0 ? splat(1) : splat(negative); }
};
struct Hardswish {
    float unused[2];
    V inner(V x) const { x = x * (1 / 6.0f) + 0.5f; x = x < 0 ? V{} : x; return x > 1 ? splat(1) : x; }
    V operator()(V x) const { return x * inner(x); }
    V slope(V x) const { return x <= -3 ? V{} : x < 3 ? x * (1 / 3.0f) + 0.5f : splat(1); }
};
struct Silu {
    float unused[2];
    V gate(V x) const { return 1 / (2 + expm1(-x)); }
    V operator()(V x) const { return x * gate(x); }
    V slope(V x) const { V s = gate(x); return s * (1 + x * (1 - s)); }
};
// erfc(z) = exp(-z^2) * t * P(t), t = 1 / (1 + 0.3275911 z), z >= 0: Abramowitz & Stegun 7.1.26, within 1.5e-7.
constexpr float ERFC[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
struct Gelu {
    float unused[2];
    V operator()(V x) const { return x * normal_below(x, bell(x)); }
    V slope(V x) const { V e = bell(x); return normal_below(x, e) + x * e * 0.3989422804014327f; }
    static V bell(V x) { return 1 + expm1(x * x * -0.5f); }
    static V normal_below(V x, V e) {
        V t = 1 / (1 + absolute(x) * (0.3275911f * 0.7071067811865476f));
        V half_tail = 0.5f * e * t * polynomial(t, ERFC);
        return x < 0 ? half_tail : 1 - half_tail;
    }
};

template <bool LAST, class K> inline V entry(const float* table, int64_t at, K k) {
    return LAST ? load(table + at, k) : splat(table[at]);
}

// f(offset, table index, Full or Part, terms) fills in the terms of SUMS sums, which go to `sums`, a row each.
template <bool LAST, int SUMS, class F> void each(const Place& p, double* sums, F f) {
    int64_t tasks = LAST ? p.blocks : p.rows, entries = LAST ? p.blocks * p.channels : p.rows;
    auto task = [&](int64_t number) {
        V term[SUMS + 1]{};
        if constexpr (LAST) {
            int64_t from = p.rows * number / p.blocks, to = p.rows * (number + 1) / p.blocks;
            for (int s = 0; s < SUMS; s++)
                for (int64_t c = 0; c < p.channels; c++) sums[s * entries + number * p.channels + c] = 0;
            for (int64_t start = from; start < to; start += 256) {
                int64_t stop = start + 256 < to ? start + 256 : to;
                auto columns = [&](int64_t c, auto vectors, auto k) {  // side by side, a cache line or more a row
                    constexpr int N = vectors.value;
                    V total[N][SUMS + 1]{};
                    for (int64_t r = start; r < stop; r++)
                        for (int v = 0; v < N; v++) {
                            f(r * p.channels + c + v * W, number * p.step + c + v * W, k, term);
                            for (int s = 0; s < SUMS; s++) total[v][s] += term[s];
                        }
                    for (int v = 0; v < N; v++)
                        for (int s = 0; s < SUMS; s++)
                            for (int i = 0; i < k.n; i++)
                                sums[s * entries + number * p.channels + c + v * W + i] += total[v][s][i];
                };
                int64_t c = 0;
                for (; c + 4 * W <= p.channels; c += 4 * W) columns(c, std::integral_constant<int, 4>{}, Full{});
                for (; c + W <= p.channels; c += W) columns(c, std::integral_constant<int, 1>{}, Full{});
                if (c < p.channels) columns(c, std::integral_constant<int, 1>{}, Part{int(p.channels - c)});
            }
        } else {
            Sum total[SUMS + 1];
            int64_t base = number * p.length, at = number % p.period, l = 0;
            int n = 0;
            for (; l + W <= p.length; l += W) {
                f(base + l, at, Full{}, term);
                for (int s = 0; s < SUMS; s++) total[s].add(term[s]);
                if (++n == 256) {
                    for (int s = 0; s < SUMS; s++) total[s].flush();
                    n = 0;
                }
            }
            if (l < p.length) {
                Part k{int(p.length - l)};
                f(base + l, at, k, term);
                for (int s = 0; s < SUMS; s++) total[s].add(keep(term[s], k));
            }
            for (int s = 0; s < SUMS; s++) {
                total[s].flush();
                total[s].template finish<false>(1);
                sums[s * entries + number] = total[s].total[0];
            }
        }
    };
    int threads = tasks < p.threads ? int(tasks) : p.threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
        for (int64_t n = tasks * me / all; n < tasks * (me + 1) / all; n++) task(n);
    }
}

template <class F> void dispatch(int half, int last, F f) {
    if (half) last ? f(Bfloat16{}, std::true_type{}) : f(Bfloat16{}, std::false_type{});
    else last ? f(0.0f, std::true_type{}) : f(0.0f, std::false_type{});
}

enum { IDENTITY, CLAMP, LEAKY, HARDSWISH, SILU, GELU };  // as activations.py counts them
template <class F> void activate(int kind, float a, float b, F f) {
    switch (kind) {
        case IDENTITY: return f(Identity{});
        case CLAMP: return f(Clamp{a, b});
        case LEAKY: return f(Leaky{a, b});
        case HARDSWISH: return f(Hardswish{});
        case SILU: return f(Silu{});
        case GELU: return f(Gelu{});
    }
}

}  // namespace

extern "C" {

// out = phi(x) * scale + shift
void channels_forward(int half, int last, const Place* p, int kind, float a, float b, void* out, const void* x,
                      const float* scale, const float* shift) {
    dispatch(half, last, [&](auto type, auto is_last) {
        activate(kind, a, b, [&](auto phi) {
            typedef decltype(type) T;
            constexpr bool LAST = is_last.value;
            each<LAST, 0>(*p, nullptr, [&](int64_t i, int64_t at, auto k, V*) {
                V y = phi(load((const T*)x + i, k));
                store((T*)out + i, y * entry<LAST>(scale, at, k) + entry<LAST>(shift, at, k), k);
            });
        });
    });
}

// grad_x = grad * scale * phi'(x); sums of grad * phi(x) and of grad
void channels_backward(int half, int last, const Place* p, int kind, float a, float b, void* grad_x, double* sums,
                       const void* x, const void* grad, const float* scale) {
    dispatch(half, last, [&](auto type, auto is_last) {
        activate(kind, a, b, [&](auto phi) {
            typedef decltype(type) T;
            constexpr bool LAST = is_last.value;
            each<LAST, 2>(*p, sums, [&](int64_t i, int64_t at, auto k, V* term) {
                V g = load((const T*)grad + i, k), v = load((const T*)x + i, k);
                term[0] = g * phi(v), term[1] = g;
                store((T*)grad_x + i, g * entry<LAST>(scale, at, k) * phi.slope(v), k);
            });
        });
    });
}

// sums of x - centre, and of its square
void channels_moments(int half, int last, const Place* p, double* sums, const void* x, const float* centre) {
    dispatch(half, last, [&](auto type, auto is_last) {
        typedef decltype(type) T;
        constexpr bool LAST = is_last.value;
        each<LAST, 2>(*p, sums, [&](int64_t i, int64_t at, auto k, V* term) {
            V v = load((const T*)x + i, k) - entry<LAST>(centre, at, k);
            term[0] = v, term[1] = v * v;
        });
    });
}

// sums of grad * (x - centre), and of grad
void channels_dots(int half, int last, const Place* p, double* sums, const void* x, const void* grad, const float* centre) {
    dispatch(half, last, [&](auto type, auto is_last) {
        typedef decltype(type) T;
        constexpr bool LAST = is_last.value;
        each<LAST, 2>(*p, sums, [&](int64_t i, int64_t at, auto k, V* term) {
            V g = load((const T*)grad + i, k);
            term[0] = g * (load((const T*)x + i, k) - entry<LAST>(centre, at, k)), term[1] = g;
        });
    });
}

// out = x * by_x + grad * by_grad + shift
void channels_combine(int half, int last, const Place* p, void* out, const void* x, const void* grad, const float* by_x,
                      const float* by_grad, const float* shift) {
    dispatch(half, last, [&](auto type, auto is_last) {
        typedef decltype(type) T;
        constexpr bool LAST = is_last.value;
        each<LAST, 0>(*p, nullptr, [&](int64_t i, int64_t at, auto k, V*) {
            V y = load((const T*)x + i, k) * entry<LAST>(by_x, at, k) + load((const T*)grad + i, k) * entry<LAST>(by_grad, at, k);
            store((T*)out + i, y + entry<LAST>(shift, at, k), k);
        });
    });
}

// Mean and variance of phi(quantile * scale + shift) a channel, and their derivatives by scale and by shift: six rows.
void channels_proxy(int64_t channels, int64_t samples, int kind, float a, float b, float* out, const float* quantiles,
                    const float* scale, const float* shift) {
    activate(kind, a, b, [&](auto phi) {
        auto columns = [&](int64_t c, auto k) {
            V by = load(scale + c, k), from = load(shift + c, k);
            Sum mean, mean_scale, mean_shift, var, var_scale, var_shift;
            for (int64_t s = 0; s < samples; s++) {
                V v = quantiles[s] * by + from, slope = phi.slope(v);
                mean.add(phi(v)), mean_scale.add(slope * quantiles[s]), mean_shift.add(slope);
                if (s % 256 == 255) flush(mean, mean_scale, mean_shift);
            }
            flush(mean, mean_scale, mean_shift);
            finish<true>(1.0 / samples, mean, mean_scale, mean_shift);
            for (int64_t s = 0; s < samples; s++) {
                V v = quantiles[s] * by + from, apart = phi(v) - mean.value(), pull = 2 * apart * phi.slope(v);
                var.add(apart * apart), var_scale.add(pull * quantiles[s]), var_shift.add(pull);
                if (s % 256 == 255) flush(var, var_scale, var_shift);
            }
            flush(var, var_scale, var_shift);
            finish<true>(1.0 / samples, var, var_scale, var_shift);
            const Sum* rows[] = {&mean, &mean_scale, &mean_shift, &var, &var_scale, &var_shift};
            for (int row = 0; row < 6; row++) store(out + row * channels + c, rows[row]->value(), k);
        };
        int64_t c = 0;
        for (; c + W <= channels; c += W) columns(c, Full{});
        if (c < channels) columns(c, Part{int(channels - c)});
    });
}
}

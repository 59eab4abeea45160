// Elementwise maps with a scale and a shift a channel, or a sample and channel, the sums that their derivatives need, and
// the tables of both: proxy-normalized activations and migrated group normalization (proxy_norm.py,
// group_migration.py, which state the same operation by operation).
//
// A tensor is `blocks` of `rows` by `channels` with channels innermost (LAST), or rows of `length` elements, one a sample
// and channel. Tables have an entry a row modulo `period`, or (LAST) a channel, `step` apart from block to block. Sums
// have an entry a row, or a channel of each block; lanes are summed in float over at most 256 vectors, then in double.

#include "vectors.h"

namespace {

struct Place { int64_t rows, length, period, channels, blocks, step, threads, half, last; };

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

// One row, or (LAST) one block. f(offset, table index, Full or Part, terms) fills in the terms of SUMS sums, which go to
// `sums`, a row each.
template <bool LAST, int SUMS, class F> void span(const Place& p, int64_t number, double* sums, F f) {
    int64_t entries = LAST ? p.blocks * p.channels : p.rows;
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
        V total[SUMS + 1]{};
        for (int s = 0; s < SUMS; s++) sums[s * entries + number] = 0;
        auto flush = [&] {
            for (int s = 0; s < SUMS; s++) sums[s * entries + number] += total_of(total[s]), total[s] = V{};
        };
        int64_t base = number * p.length, at = number % p.period, l = 0;
        int n = 0;
        for (; l + W <= p.length; l += W) {
            f(base + l, at, Full{}, term);
            for (int s = 0; s < SUMS; s++) total[s] += term[s];
            if (++n == 256) flush(), n = 0;
        }
        if (l < p.length) {
            Part k{int(p.length - l)};
            f(base + l, at, k, term);
            for (int s = 0; s < SUMS; s++) total[s] += keep(term[s], k);
        }
        flush();
    }
}

// task(n) for each n; the same thread has the same n whenever they are as many.
template <class F> void each(int64_t tasks, int threads, F task) {
    threads = tasks < threads ? int(tasks) : threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
        for (int64_t n = tasks * me / all; n < tasks * (me + 1) / all; n++) task(n);
    }
}
template <bool LAST> int64_t spans(const Place& p) { return LAST ? p.blocks : p.rows; }

// Samples' groups of channels. A group is rows, or (LAST) groups are columns of their sample's block.
template <bool LAST> struct Groups {
    const Place& p;
    int64_t count, channels, samples, entries;  // `entries` of samples and channels
    double size;                                // of a row, or a block's column

    Groups(const Place& place, int64_t groups)
        : p(place), count(groups), channels(p.channels / groups), samples(LAST ? p.blocks : p.rows / p.channels),
          entries(samples * p.channels), size(LAST ? double(p.rows) / p.blocks : double(p.length)) {}

    // first(span), table(group, its first entry, its first channel) and last(span); where there are enough of them, a
    // thread goes through all of it with what it still has in cache.
    template <class A, class B, class C> void walk(A first, B table, C last) const {
        int64_t wholes = LAST ? samples : samples * count, each_has = LAST ? 1 : channels;
        auto tables = [&](int64_t whole) {
            for (int64_t i = 0; i < (LAST ? count : 1); i++) {
                int64_t group = LAST ? whole * count + i : whole;
                table(group, group * channels, group % count * channels);
            }
        };
        if (wholes >= p.threads)
            return each(wholes, p.threads, [&](int64_t whole) {
                for (int64_t n = whole * each_has; n < (whole + 1) * each_has; n++) first(n);
                tables(whole);
                for (int64_t n = whole * each_has; n < (whole + 1) * each_has; n++) last(n);
            });
        each(wholes * each_has, p.threads, first);
        each(wholes, p.threads, tables);
        each(wholes * each_has, p.threads, last);
    }
    // Set the entries of a span to their channel's value.
    void spread(float* to, int64_t span, const float* values) const {
        if (LAST) std::memcpy(to + span * p.channels, values, p.channels * sizeof *values);
        else to[span] = values[span % p.channels];
    }
};

inline double or_one(const float* p, int64_t i) { return p ? p[i] : 1; }
template <class K> inline V given(const float* p, int64_t c, K k, float absent) { return p ? load(p + c, k) : splat(absent); }

template <class F> void dispatch(int half, int last, F f) {
    if (half) last ? f(Bfloat16{}, std::true_type{}) : f(Bfloat16{}, std::false_type{});
    else last ? f(0.0f, std::true_type{}) : f(0.0f, std::false_type{});
}

enum { CLAMP, LEAKY, HARDSWISH, SILU, GELU };  // as channelwise.py counts them
template <class F> void activate(int kind, float a, float b, F f) {
    switch (kind) {
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
void channels_forward(const Place* p, int64_t kind, float a, float b, void* out, const void* x, const float* scale,
                      const float* shift) {
    dispatch(p->half, p->last, [&](auto type, auto is_last) {
        activate(kind, a, b, [&](auto phi) {
            typedef decltype(type) T;
            constexpr bool LAST = is_last.value;
            each(spans<LAST>(*p), p->threads, [&](int64_t number) {
                span<LAST, 0>(*p, number, nullptr, [&](int64_t i, int64_t at, auto k, V*) {
                    V y = phi(load((const T*)x + i, k));
                    store((T*)out + i, y * entry<LAST>(scale, at, k) + entry<LAST>(shift, at, k), k);
                });
            });
        });
    });
}

// grad_x = grad * scale * phi'(x); sums of grad * phi(x) and of grad
void channels_backward(const Place* p, int64_t kind, float a, float b, void* grad_x, double* sums, const void* x,
                       const void* grad, const float* scale) {
    dispatch(p->half, p->last, [&](auto type, auto is_last) {
        activate(kind, a, b, [&](auto phi) {
            typedef decltype(type) T;
            constexpr bool LAST = is_last.value;
            each(spans<LAST>(*p), p->threads, [&](int64_t number) {
                span<LAST, 2>(*p, number, sums, [&](int64_t i, int64_t at, auto k, V* term) {
                    V g = load((const T*)grad + i, k), v = load((const T*)x + i, k);
                    term[0] = g * phi(v), term[1] = g;
                    store((T*)grad_x + i, g * entry<LAST>(scale, at, k) * phi.slope(v), k);
                });
            });
        });
    });
}

// Scale and shift of a proxy-normalized activation, and the derivatives of both by gamma * Y's scale and by its shift: six
// rows of `tables`. Y is proxied by `quantiles` of the standard normal; absent pointers are ones, or zeros.
void proxy_tables(int64_t channels, int64_t samples, int64_t kind, float a, float b, float eps, float t, int64_t divide,
                  float* tables, const float* quantiles, const float* gamma, const float* beta, const float* proxy_scale,
                  const float* proxy_bias, const float* restore_scale, const float* restore_shift) {
    activate(kind, a, b, [&](auto phi) {
        auto columns = [&](int64_t c, auto k) {
            V by = given(gamma, c, k, 1), from = given(proxy_bias, c, k, 0) * by + given(beta, c, k, 0);
            by *= 1 + given(proxy_scale, c, k, 0);
            V middle = phi(from);  // Y's median: no further from the mean than the deviation, if phi is monotone
            Sum<true> mean, power, slopes, slopes_q, apart_slopes, apart_slopes_q;
            auto next = [&] { flush(mean, power, slopes, slopes_q, apart_slopes, apart_slopes_q); };
            for (int64_t s = 0; s < samples; s++) {
                V v = quantiles[s] * by + from, apart = phi(v) - middle, slope = phi.slope(v), pull = apart * slope;
                mean.add(apart), power.add(apart * apart), slopes.add(slope), slopes_q.add(slope * quantiles[s]);
                apart_slopes.add(pull), apart_slopes_q.add(pull * quantiles[s]);
                if (s % 256 == 255) next();
            }
            next();
            finish(1.0 / samples, mean, power, slopes, slopes_q, apart_slopes, apart_slopes_q);
            float rows[6][W];
            for (int i = 0; i < W; i++) {
                double var = power[i] - mean[i] * mean[i];
                double by_scale = 2 * (apart_slopes_q[i] - mean[i] * slopes_q[i]);
                double by_shift = 2 * (apart_slopes[i] - mean[i] * slopes[i]);
                var = (var < 0 ? 0 : var) + eps;
                bool there = i < k.n;
                double expected = middle[i] + mean[i], r = divide ? 1 / std::sqrt(var) : 1;
                if (divide && restore_scale && there) r *= restore_scale[c + i];
                double back = restore_shift && there ? restore_shift[c + i] : 0, slope = divide ? -0.5 * r / var : 0;
                rows[0][i] = float(1 + t * (r - 1)), rows[1][i] = float(t * (back - r * expected));
                rows[2][i] = float(t * slope * by_scale), rows[3][i] = float(t * slope * by_shift);
                rows[4][i] = float(-t * (slope * by_scale * expected + r * slopes_q[i]));
                rows[5][i] = float(-t * (slope * by_shift * expected + r * slopes[i]));
            }
            for (int row = 0; row < 6; row++) store(tables + row * channels + c, load(rows[row], Full{}), k);
        };
        int64_t c = 0;
        for (; c + W <= channels; c += W) columns(c, Full{});
        if (c < channels) columns(c, Part{int(channels - c)});
    });
}

// Gradients of gamma, beta, proxy_scale and proxy_bias, four rows, from the `copies` of channels_backward's sums.
void proxy_gradients(int64_t channels, int64_t copies, float* out, const double* sums, const float* tables,
                     const float* gamma, const float* proxy_scale, const float* proxy_bias) {
    for (int64_t c = 0; c < channels; c++) {
        double scale = 0, shift = 0;
        for (int64_t n = 0; n < copies; n++)
            scale += sums[n * channels + c], shift += sums[(copies + n) * channels + c];
        double by = scale * tables[2 * channels + c] + shift * tables[4 * channels + c];
        double from = scale * tables[3 * channels + c] + shift * tables[5 * channels + c];
        out[c] = float(by * (1 + (proxy_scale ? proxy_scale[c] : 0)) + from * (proxy_bias ? proxy_bias[c] : 0));
        out[channels + c] = float(from);
        out[2 * channels + c] = float(by * or_one(gamma, c)), out[3 * channels + c] = float(from * or_one(gamma, c));
    }
}

// With x' = (x - mean) * rstd * gain: out = (x' - t * m) * k * gamma / gain + beta, k = 1 / sqrt(1 - t + t * (v + eps)), m
// and v the moments of x' a group. `kept` is filled with rstd a channel, then m and k a group; sums have two rows of a
// sample and channel, tables as well.
void migrated_forward(const Place* p, int64_t groups, float t, float eps, float source_eps, void* out, const void* x,
                      float* kept, double* sums, float* tables, const float* mean, const float* var, const float* gain,
                      const float* gamma, const float* beta) {
    dispatch(p->half, p->last, [&](auto type, auto is_last) {
        typedef decltype(type) T;
        constexpr bool LAST = is_last.value;
        Groups<LAST> g(*p, groups);
        float *rstd = kept, *ms = kept + p->channels, *ks = ms + g.samples * groups;
        float *centre = tables, *scale = tables, *shift = tables + g.entries;
        for (int64_t c = 0; c < p->channels; c++) rstd[c] = float(1 / std::sqrt(double(var[c]) + source_eps));
        auto deviations = [&](int64_t i, int64_t at, auto k, V* term) {
            V v = load((const T*)x + i, k) - entry<LAST>(centre, at, k);
            term[0] = v, term[1] = v * v;
        };
        auto moments = [&](int64_t number) {
            g.spread(centre, number, mean);
            span<LAST, 1>(*p, number, sums, deviations);
            int64_t many = LAST ? p->channels : 1;
            for (int64_t e = number * many; e < (number + 1) * many; e++) centre[e] += float(sums[e] / g.size);
            span<LAST, 2>(*p, number, sums, deviations);
        };
        auto table = [&](int64_t group, int64_t first, int64_t channel) {
            double m = 0, v = 0;
            auto of = [&](int64_t i, double& weight) {  // mean of x' in a row, and what x counts in it
                weight = rstd[channel + i] * or_one(gain, channel + i);
                return (double(centre[first + i]) - mean[channel + i] + sums[first + i] / g.size) * weight;
            };
            double weight;
            for (int64_t i = 0; i < g.channels; i++) m += of(i, weight) / g.channels;
            for (int64_t i = 0; i < g.channels; i++) {
                double apart = of(i, weight) - m, off = sums[first + i] / g.size;
                double within = sums[g.entries + first + i] / g.size - off * off;
                v += ((within < 0 ? 0 : within) * weight * weight + apart * apart) / g.channels;
            }
            if (!(t > 0)) m = 0, v = 1;  // then moments do not count, not even where they overflow
            double k = 1 / std::sqrt((1 - t) + t * (v + eps));
            ms[group] = float(m), ks[group] = float(k);
            for (int64_t i = 0; i < g.channels; i++) {
                int64_t c = channel + i;
                double by = k * or_one(gamma, c), at = double(mean[c]) * rstd[c] + t * m / or_one(gain, c);
                scale[first + i] = float(by * rstd[c]), shift[first + i] = float((beta ? beta[c] : 0) - by * at);
            }
        };
        g.walk(moments, table, [&](int64_t number) {
            span<LAST, 0>(*p, number, nullptr, [&](int64_t i, int64_t at, auto k, V*) {
                V y = load((const T*)x + i, k) * entry<LAST>(scale, at, k) + entry<LAST>(shift, at, k);
                store((T*)out + i, y, k);
            });
        });
    });
}

// Gradients of x (absent if it needs none) and, two rows of `out`, of gamma and beta; tables have three rows here. With
// x^ = (x' - t * m) * k, g^ = grad * gamma / gain and means over the group:
// d x' = k * (g^ - t * mean(g^) - t * k * (x' - m) * mean(g^ * x^))
void migrated_backward(const Place* p, int64_t groups, float t, void* grad_x, float* out, const void* x, const void* grad,
                       const float* kept, double* sums, float* tables, const float* mean, const float* gain,
                       const float* gamma) {
    dispatch(p->half, p->last, [&](auto type, auto is_last) {
        typedef decltype(type) T;
        constexpr bool LAST = is_last.value;
        Groups<LAST> g(*p, groups);
        const float *rstd = kept, *ms = kept + p->channels, *ks = ms + g.samples * groups;
        float *centre = tables, *by_x = tables, *by_grad = tables + g.entries, *shift = tables + 2 * g.entries;
        double *dots = sums, *totals = sums + g.entries;
        auto dot = [&](int64_t number) {
            g.spread(centre, number, mean);
            span<LAST, 2>(*p, number, sums, [&](int64_t i, int64_t at, auto k, V* term) {
                V v = load((const T*)grad + i, k);
                term[0] = v * (load((const T*)x + i, k) - entry<LAST>(centre, at, k)), term[1] = v;
            });
        };
        auto table = [&](int64_t group, int64_t first, int64_t channel) {
            double m = ms[group], k = ks[group], along = 0, total = 0, size = g.size * g.channels;
            for (int64_t i = 0; i < g.channels; i++) {
                int64_t c = channel + i, e = first + i;
                dots[e] = (dots[e] * rstd[c] - t * m / or_one(gain, c) * totals[e]) * k;  // of grad * x^ / gain
                along += dots[e] * or_one(gamma, c) / size;
                total += totals[e] * or_one(gamma, c) / or_one(gain, c) / size;
            }
            for (int64_t i = 0; i < g.channels; i++) {
                int64_t c = channel + i, e = first + i;
                double by = or_one(gain, c), slope = -t * (k * by) * (k * by) * along;
                double at = double(mean[c]) * rstd[c] + m / by;
                by_x[e] = float(slope * rstd[c] * rstd[c]), by_grad[e] = float(k * or_one(gamma, c) * rstd[c]);
                shift[e] = float((-t * k * by * total - slope * at) * rstd[c]);
            }
        };
        g.walk(dot, table, [&](int64_t number) {
            if (grad_x) span<LAST, 0>(*p, number, nullptr, [&](int64_t i, int64_t at, auto k, V*) {
                V y = load((const T*)x + i, k) * entry<LAST>(by_x, at, k);
                y += load((const T*)grad + i, k) * entry<LAST>(by_grad, at, k) + entry<LAST>(shift, at, k);
                store((T*)grad_x + i, y, k);
            });
        });
        for (int64_t c = 0; c < p->channels; c++) {
            double dot = 0, total = 0;
            for (int64_t n = 0; n < g.samples; n++) dot += dots[n * p->channels + c], total += totals[n * p->channels + c];
            out[c] = float(dot), out[p->channels + c] = float(total);
        }
    });
}
}

// Normality normalization over the sets of a tensor in memory order (Eftekhari & Papyan 2025, algorithm 1): forward,
// closed-form backward, and evaluation by given statistics. `formulas.py` states the same operation by operation.
//
// A set is `runs` stretches of memory, worked on while they are in cache: each pass below goes over one set. Either a
// stretch is `length` elements of the one set and vector lanes are summed at the end, or (COLUMNS) neighbouring lanes
// belong to neighbouring sets and never meet. Lanes are summed in float over at most 256 vectors, then in double.

#include "vectors.h"

namespace {

// What a set is, in elements: set (o, i) starts at o * outer_stride + i * inner_stride, its affine at i * affine_inner.
struct Geometry {
    int64_t outer, outer_stride, inner, inner_stride, runs, run_stride, length;
    int64_t affine_inner, affine_run, affine_lane, affine_size;
};

struct Options { float t, eps, factor; uint32_t seed0, seed1; int noise, threads, stage; };

// Where ranks share the sets, a stage a call, and between them `parts`, a column a set: means over this rank's values
// going out, over all ranks' coming back (ranks.py).
enum { ALL = -1 };
enum { PART_MEAN, PART_VAR, PART_M1, PART_M2, PART_M3, PART_M45, PART_V, PART_LOW, PART_HIGH, PART_CENTRE, PART_SPREAD };

enum { MEAN, VAR, RSTD, STEP, C1, C2, C3, C45, CV, SPREAD, FIELDS };  // rows of `stats`, a column a set

inline U mix(U key, int shift) { return key ^ (key >> shift); }

// See noise.py.
constexpr float NUMERATOR[] = {2.928853064076975e-05f, 0.0009993967832997441f, 0.011874854564666748f,
                               0.08982928842306137f, 0.4523918926715851f, 1.2533142566680908f};
constexpr float DENOMINATOR[] = {1.0084270343213575e-06f, 0.00016978503845166415f, 0.0022797624114900827f,
                                 0.032670583575963974f, 0.09915989637374878f, 1.0f};
inline V normal(int64_t position, const Options& o) {
    U key = (U)iota() + (uint32_t(position) + o.seed0);
    key = mix(key, 17) * 0xED5AD4BBu;
    key = (mix(key, 11) + o.seed1) * 0xAC4C1B51u;
    key = mix(mix(key, 15) * 0x31848BABu, 14);
    V v = __builtin_convertvector((I)(key & 0x7FFFFFFF), V) * 0x1p-31f + 0x1p-32f;
    V w = -log(v * (2 - v));
    V z = (1 - v) * polynomial(w, NUMERATOR) / polynomial(w, DENOMINATOR);
    return (V)((U)z | (key & 0x80000000u));
}

// psi = expm1(u) * reach, u = log * power, by the sign of h
struct Transform {
    V up, down, reach_up, reach_down;
    explicit Transform(V change) {
        up = 1 + change, down = 1 - change;
        up = up == 0 ? splat(1e-20f) : up;  // expm1(p * l) / p is then l
        down = down == 0 ? splat(1e-20f) : down;
        reach_up = 1 / up, reach_down = -1 / down;
    }
    V exponent(V h, V log) const { return log * (h < 0 ? down : up); }
    V operator()(V h, V growth) const { return growth * (h < 0 ? reach_down : reach_up); }
};

// What one pass over a small set leaves for the next, in the order of the walk: the next need not compute it again.
struct Scratch {
    static constexpr int64_t ROOM = 1 << 14;  // elements, with those that fill up vectors; it stays in cache
    float first[ROOM], second[ROOM];
};

template <bool COLUMNS> struct Set {
    static constexpr int64_t AHEAD = 16;  // rows
    const Geometry& g;
    int64_t base, affine, length, index;
    double count;

    Set(const Geometry& geometry, int64_t number) : g(geometry) {
        int64_t o = number / g.inner, i = number % g.inner;
        base = o * g.outer_stride + i * g.inner_stride;
        affine = i * g.affine_inner;
        length = COLUMNS ? (g.length - i * W < W ? g.length - i * W : W) : g.length;
        index = COLUMNS ? o * g.length + i * W : number;
        count = double(g.runs) * (COLUMNS ? 1 : g.length);
    }

    bool fits_scratch() const { return g.runs * ((length + W - 1) / W) * W <= Scratch::ROOM; }
    bool by_lane() const { return !COLUMNS && g.affine_lane; }
    int lanes() const { return COLUMNS ? int(length) : 1; }

    // body(offset, affine index, Full or Part); begin and end once a run, flush every so often
    template <class Begin, class Body, class End, class Flush>
    void walk(Begin begin, Body body, End end, Flush flush) const {
        int n = 0;
        for (int64_t r = 0; r < g.runs; r++) {
            int64_t offset = base + r * g.run_stride, at = affine + r * g.affine_run, l = 0;
            begin(at);
            for (; l + W <= length; l += W) {
                body(offset + l, at + (COLUMNS ? 0 : l * g.affine_lane), Full{});
                if (++n == 256) { flush(); n = 0; }
            }
            if (l < length) body(offset + l, at + (COLUMNS ? 0 : l * g.affine_lane), Part{int(length - l)});
            if (++n >= 256) { flush(); n = 0; }
            end(at);
        }
        flush();
    }
    template <class Body, class Flush> void walk(Body body, Flush flush) const {
        walk([](int64_t) {}, body, [](int64_t) {}, flush);
    }

    // Neighbouring rows of columns are far apart: what a later step of the walk needs is asked for early.
    template <class P> void ahead(const P* p) const {
        if (COLUMNS) __builtin_prefetch((const void*)(uintptr_t(p) + AHEAD * g.run_stride * sizeof(P)));
    }

    V parameter(const float* p, int64_t at, float absent) const {  // one a run
        if (!p) return splat(absent);
        return COLUMNS && g.affine_lane ? load(p + at, Part{int(length)}) : splat(p[at]);
    }
    V field(const float* stats, int row, int64_t sets) const {
        const float* p = stats + row * sets + index;
        return COLUMNS ? load(p, Part{int(length)}) : splat(*p);
    }
    void put(float* stats, int row, int64_t sets, V v) const { store(stats + row * sets + index, v, Part{lanes()}); }
};

struct Moments { double m1, m2, m3, m45, v, low, high; };

// lambda_estimate.first_step and its gradient with respect to the moments; the constants come with the build
inline void newton(const Moments& m, float* out) {
    double v = m.v < TINY ? TINY : m.v, ratio = m.m2 / v, slope = ratio - m.m1;
    double bend = (m.m45 - m.m3 * m.m3) / v, raw = bend - 2 * ratio * ratio;
    double curvature = raw < MIN_CURVATURE ? MIN_CURVATURE : raw, step = -slope / curvature;
    double least = -LOG_STRETCH / std::log1p(-m.low < TINY ? TINY : -m.low);
    double most = LOG_STRETCH / std::log1p(m.high < TINY ? TINY : m.high);
    bool free = step >= least && step <= most;
    step = step < least ? least : step > most ? most : step;
    double slopes = free ? -1 / curvature : 0, curves = free && raw > MIN_CURVATURE ? slope / (curvature * curvature) : 0;
    out[STEP] = float(step);
    out[C1] = float(-slopes);
    out[C2] = float((slopes - 4 * curves * ratio) / v);
    out[C3] = float(-2 * curves * m.m3 / v);
    out[C45] = float(curves / v);
    out[CV] = float((-slopes * ratio - curves * bend + 4 * curves * ratio * ratio) / v);
}

template <class T, bool COLUMNS>
void forward_set(const Set<COLUMNS>& s, int64_t sets, T* out, const T* x, const float* weight, const float* bias,
                 float* stats, float* parts, const Options& o, Scratch& scratch) {
    constexpr bool KEEP = sizeof(T) == 4;  // whether `out` can hold y until the noise's scale is known
    double scale = 1 / s.count;
    auto now = [&](int stage) { return o.stage == ALL || o.stage == stage; };
    V mean{}, var{}, rstd{};
    if (now(0)) {
        Sum sum, power;
        s.walk([&](int64_t i, int64_t, auto k) { s.ahead(x + i), sum.add(load(x + i, k)); }, [&] { sum.flush(); });
        finish<COLUMNS>(scale, sum);
        mean = sum.value();
        Sum offset;
        s.walk([&](int64_t i, int64_t, auto k) {
            s.ahead(x + i);
            V c = keep(load(x + i, k) - mean, k);
            offset.add(c), power.add(c * c);
        }, [&] { offset.flush(), power.flush(); });
        finish<COLUMNS>(scale, offset);
        finish<COLUMNS>(scale, power);
        for (int i = 0; i < (COLUMNS ? W : 1); i++) {
            double shift = offset.total[i], all = power.total[i] - shift * shift;
            mean[i] = float(sum.total[i] + (std::isnan(shift) ? 0 : shift));
            all = all < 0 ? 0 : all;
            var[i] = float(all);
            rstd[i] = float(1 / std::sqrt(all + o.eps));
        }
        if (!COLUMNS) mean = splat(mean[0]), var = splat(var[0]), rstd = splat(rstd[0]);
        if (o.stage == 0) return s.put(parts, PART_MEAN, sets, mean), s.put(parts, PART_VAR, sets, var);
    } else {
        mean = s.field(parts, PART_MEAN, sets), var = s.field(parts, PART_VAR, sets);
        for (int i = 0; i < W; i++) rstd[i] = float(1 / std::sqrt(double(var[i]) + o.eps));
    }

    bool logs = o.stage == ALL && s.fits_scratch();
    float* place = scratch.first;
    Sum m1, m2, m3, m45, v;
    V low = splat(INFINITY), high = splat(-INFINITY);
    if (now(1)) s.walk([&](int64_t i, int64_t, auto k) {
        s.ahead(x + i);
        V h = keep((load(x + i, k) - mean) * rstd, k), a = absolute(h), log = log1p(a);
        if (logs) store(place, log, Full{}), place += W;
        V grown = log + a * log, d = grown - a, e = grown * log - 2 * d;
        m1.add(signed_as(h, log)), m2.add(h * d), m3.add(d), m45.add(a * e + d * d), v.add(h * h);
        low = h < low ? h : low;  // a lane that holds no element holds 0, which the mean of the set is
        high = h > high ? h : high;
    }, [&] { m1.flush(), m2.flush(), m3.flush(), m45.flush(), v.flush(); });
    finish<COLUMNS>(scale, m1, m2, m3, m45, v);
    if (!COLUMNS)
        for (int i = 1; i < W; i++) low[0] = low[i] < low[0] ? low[i] : low[0], high[0] = high[i] > high[0] ? high[i] : high[0];
    const std::pair<int, Sum*> moments[] = {{PART_M1, &m1}, {PART_M2, &m2}, {PART_M3, &m3}, {PART_M45, &m45}, {PART_V, &v}};
    if (o.stage == 1) {
        for (auto& [row, sum] : moments) s.put(parts, row, sets, sum->value());
        return s.put(parts, PART_LOW, sets, low), s.put(parts, PART_HIGH, sets, high);
    }
    if (o.stage > 1) {
        for (auto& [row, sum] : moments) *sum = Sum(s.field(parts, row, sets));
        low = s.field(parts, PART_LOW, sets), high = s.field(parts, PART_HIGH, sets);
    }
    V found[FIELDS] = {mean, var, rstd};
    for (int i = 0; i < (COLUMNS ? W : 1); i++) {
        float row[FIELDS];
        newton({m1.total[i], m2.total[i], m3.total[i], m45.total[i], v.total[i], low[i], high[i]}, row);
        for (int f = STEP; f < SPREAD; f++) found[f][i] = row[f];
    }
    if (!COLUMNS) found[STEP] = splat(found[STEP][0]);

    Transform psi(o.t * found[STEP]);
    auto transform = [&](int64_t i, auto k) {
        s.ahead(x + i);
        V h = (load(x + i, k) - mean) * rstd, log;
        if (logs) log = load(place, Full{}), place += W;
        else log = log1p(absolute(h));
        return psi(h, expm1(psi.exponent(h, log)));
    };
    auto rewind = [&] { place = scratch.first; };
    V amount{};
    auto y_at = [&](int64_t i, auto k) {
        if constexpr (KEEP) return s.ahead(out + i), load(out + i, k);
        else return transform(i, k);
    };
    if (o.noise) {
        Sum total, deviation;
        rewind();
        if (now(2)) s.walk([&](int64_t i, int64_t, auto k) {
            V y = transform(i, k);
            if constexpr (KEEP) s.ahead(out + i), store(out + i, y, k);
            total.add(keep(y, k));
        }, [&] { total.flush(); });
        finish<COLUMNS>(scale, total);
        if (o.stage == 2) return s.put(parts, PART_CENTRE, sets, total.value());
        V centre = o.stage > 2 ? s.field(parts, PART_CENTRE, sets) : total.value();
        rewind();
        if (now(3)) s.walk([&](int64_t i, int64_t, auto k) { deviation.add(keep(absolute(y_at(i, k) - centre), k)); },
                           [&] { deviation.flush(); });
        finish<COLUMNS>(scale, deviation);
        if (o.stage == 3) return s.put(parts, PART_SPREAD, sets, deviation.value());
        found[SPREAD] = o.stage > 3 ? s.field(parts, PART_SPREAD, sets) : deviation.value();
        amount = o.factor * found[SPREAD];
    }
    bool by_lane = s.by_lane();
    V gamma, beta;
    auto begin = [&](int64_t at) {
        if (!by_lane) gamma = s.parameter(weight, at, 1), beta = s.parameter(bias, at, 0);
    };
    auto put = [&](int64_t i, int64_t at, auto k, V y) {
        V scaled = by_lane && weight ? y * load(weight + at, k) : by_lane ? y : y * gamma;
        s.ahead(out + i);
        store(out + i, by_lane && bias ? scaled + load(bias + at, k) : by_lane ? scaled : scaled + beta, k);
    };
    auto nothing = [](int64_t) {};
    rewind();
    if (o.noise)
        s.walk(begin, [&](int64_t i, int64_t at, auto k) { put(i, at, k, y_at(i, k) + normal(i, o) * amount); },
               nothing, [] {});
    else
        s.walk(begin, [&](int64_t i, int64_t at, auto k) { put(i, at, k, transform(i, k)); }, nothing, [] {});
    for (int f = 0; f < FIELDS; f++) s.put(stats, f, sets, found[f]);
}

constexpr float SERIES[] = {1 / 5760.f, 1 / 840.f, 1 / 144.f, 1 / 30.f, 1 / 8.f, 1 / 3.f, 1 / 2.f};

template <class T, bool COLUMNS>
void backward_set(const Set<COLUMNS>& s, int64_t sets, T* grad_x, float* grad_weight, float* grad_bias, const T* x,
                  const T* grad, const float* weight, const float* stats, float* parts, const Options& o,
                  Scratch& scratch) {
    constexpr bool KEEP = sizeof(T) == 4;  // whether `grad_x` can hold the direct part until the projections are known
    V mean = s.field(stats, MEAN, sets), rstd = s.field(stats, RSTD, sets);
    V c1 = s.field(stats, C1, sets), c2 = s.field(stats, C2, sets), c3 = s.field(stats, C3, sets);
    V c45 = s.field(stats, C45, sets), cv = 2 * s.field(stats, CV, sets);
    V amount = o.noise ? o.factor * s.field(stats, SPREAD, sets) : V{};
    Transform psi(o.t * s.field(stats, STEP, sets));
    bool by_lane = s.by_lane();
    auto shift_of = [&](V h, V a, V log, V inverse) {  // count * d step / d h
        V both = a * log, grown = log + both, d = grown - a;
        V inner = grown * log - 2 * d + log * (both + 2 * d);
        return c1 * inverse + c2 * (d + both) + cv * h + signed_as(h, c45 * inner + c3 * log);
    };
    V gamma = splat(1);
    auto begin = [&](int64_t at) { if (!by_lane) gamma = s.parameter(weight, at, 1); };
    auto gain = [&](int64_t at, auto k) { return by_lane && weight ? load(weight + at, k) : gamma; };

    bool pulls = o.stage == ALL && s.fits_scratch();
    float *shifts = scratch.first, *directs = scratch.second;
    Sum to_lmbda, d0, dh, s0, sh, w, b;
    bool once = !by_lane && !s.g.affine_run, runwise = !by_lane && s.g.affine_run;
    if (o.stage <= 0) s.walk(begin, [&](int64_t i, int64_t at, auto k) {
        s.ahead(x + i), s.ahead(grad + i);
        V h = keep((load(x + i, k) - mean) * rstd, k), grad_y = load(grad + i, k);
        V a = absolute(h), log = log1p(a), u = psi.exponent(h, log), growth = expm1(u), inverse = 1 / (1 + a);
        V g = grad_y * gain(at, k), direct = g * ((growth + 1) * inverse), shift = keep(shift_of(h, a, log, inverse), k);
        V near = polynomial(u, SERIES), far = ((growth + 1) * u - growth) / (u * u);
        to_lmbda.add(g * (log * log * (absolute(u) < 0.3f ? near : far)));
        d0.add(direct), dh.add(direct * h), s0.add(shift), sh.add(shift * h);
        if (pulls) {
            store(shifts, shift, Full{}), store(directs, direct, Full{});
            shifts += W, directs += W;
        } else if constexpr (KEEP) {
            s.ahead(grad_x + i), store(grad_x + i, direct, k);
        }
        V y = psi(h, growth);
        if (o.noise) y += normal(i, o) * amount;
        if (by_lane) {
            store(grad_weight + at, load(grad_weight + at, k) + grad_y * y, k);
            store(grad_bias + at, load(grad_bias + at, k) + grad_y, k);
        } else {
            w.add(grad_y * y), b.add(grad_y);
        }
    }, [&](int64_t at) {
        if (!runwise) return;
        w.flush(), b.flush();
        grad_weight[at] += float(total_of(w.total)), grad_bias[at] += float(total_of(b.total));
        w = Sum(), b = Sum();
    }, [&] {
        flush(to_lmbda, d0, dh, s0, sh, w, b);
    });
    if (once && o.stage <= 0) {
        finish<COLUMNS>(1, w, b);
        for (int i = 0; i < s.lanes(); i++) {
            int64_t at = s.affine + i * s.g.affine_lane;
            grad_weight[at] += float(w.total[i]), grad_bias[at] += float(b.total[i]);
        }
    }
    finish<COLUMNS>(1 / s.count, to_lmbda, d0, dh, s0, sh);
    Sum* means[] = {&to_lmbda, &d0, &dh, &s0, &sh};
    for (int row = 0; row < 5; row++) {
        if (o.stage == 0) s.put(parts, row, sets, means[row]->value());
        if (o.stage == 1) *means[row] = Sum(s.field(parts, row, sets));
    }
    if (o.stage == 0) return;
    V pull = o.t * to_lmbda.value();
    V centre = d0.value() + pull * s0.value(), slope = dh.value() + pull * sh.value();
    shifts = scratch.first, directs = scratch.second;
    if (pulls) return s.walk([&](int64_t i, int64_t, auto k) {
        s.ahead(x + i);
        V h = (load(x + i, k) - mean) * rstd, shift = load(shifts, Full{}), direct = load(directs, Full{});
        shifts += W, directs += W;
        store(grad_x + i, rstd * (direct + pull * shift - centre - h * slope), k);
    }, [] {});
    s.walk(begin, [&](int64_t i, int64_t at, auto k) {
        s.ahead(x + i);
        if (KEEP) s.ahead(grad_x + i);
        V h = (load(x + i, k) - mean) * rstd, a = absolute(h), log = log1p(a), inverse = 1 / (1 + a), direct;
        if constexpr (KEEP) direct = load(grad_x + i, k);
        else direct = load(grad + i, k) * gain(at, k) * ((expm1(psi.exponent(h, log)) + 1) * inverse);
        store(grad_x + i, rstd * (direct + pull * shift_of(h, a, log, inverse) - centre - h * slope), k);
    }, [](int64_t) {}, [] {});
}

template <class T, bool COLUMNS>
void apply_set(const Set<COLUMNS>& s, int64_t sets, T* out, const T* x, const float* constants) {
    V mean = s.field(constants, 0, sets), rstd = s.field(constants, 1, sets);
    V gamma = s.field(constants, 3, sets), beta = s.field(constants, 4, sets);
    Transform psi(s.field(constants, 2, sets));
    s.walk([&](int64_t i, int64_t, auto k) {
        s.ahead(x + i);
        V h = (load(x + i, k) - mean) * rstd;
        store(out + i, psi(h, expm1(psi.exponent(h, log1p(absolute(h))))) * gamma + beta, k);
    }, [] {});
}

// The sets in equal consecutive shares to the threads, so that sums do not depend on who finishes first.
template <bool COLUMNS, class F> void each_set(const Geometry& g, int threads, F f) {
    int64_t tasks = g.outer * g.inner;
    threads = tasks < threads ? int(tasks) : threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Scratch scratch;
        int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
        for (int64_t n = tasks * me / all; n < tasks * (me + 1) / all; n++) f(Set<COLUMNS>(g, n), int(me), scratch);
    }
}

template <class F> void dispatch(int half, int columns, F f) {
    if (half) columns ? f(Bfloat16{}, std::true_type{}) : f(Bfloat16{}, std::false_type{});
    else columns ? f(0.0f, std::true_type{}) : f(0.0f, std::false_type{});
}

inline int64_t sets_of(const Geometry& g, bool columns) { return g.outer * (columns ? g.length : g.inner); }

}  // namespace

extern "C" {

int width() { return W; }

void forward(int half, int columns, const Geometry* g, const Options* o, void* out, const void* x, const float* weight,
             const float* bias, float* stats, float* parts) {
    dispatch(half, columns, [&](auto type, auto column) {
        typedef decltype(type) T;
        each_set<column.value>(*g, o->threads, [&](auto set, int, Scratch& scratch) {
            forward_set<T>(set, sets_of(*g, column.value), (T*)out, (const T*)x, weight, bias, stats, parts, *o, scratch);
        });
    });
}

// `shares` holds, a thread, the gradients of weight and bias of the sets it worked on: zero at first.
void backward(int half, int columns, const Geometry* g, const Options* o, void* grad_x, float* shares, const void* x,
              const void* grad, const float* weight, const float* stats, float* parts) {
    dispatch(half, columns, [&](auto type, auto column) {
        typedef decltype(type) T;
        each_set<column.value>(*g, o->threads, [&](auto set, int thread, Scratch& scratch) {
            float* share = shares + thread * 2 * g->affine_size;
            backward_set<T>(set, sets_of(*g, column.value), (T*)grad_x, share, share + g->affine_size, (const T*)x,
                            (const T*)grad, weight, stats, parts, *o, scratch);
        });
    });
}

// `constants` has five rows, a column a set: mean, 1 / std, lambda - 1, gamma, beta.
void apply(int half, int columns, const Geometry* g, const Options* o, void* out, const void* x, const float* constants) {
    dispatch(half, columns, [&](auto type, auto column) {
        typedef decltype(type) T;
        each_set<column.value>(*g, o->threads, [&](auto set, int, Scratch&) {
            apply_set<T>(set, sets_of(*g, column.value), (T*)out, (const T*)x, constants);
        });
    });
}
}

// Normality normalization over the sets of a tensor in memory order (Eftekhari & Papyan 2025, algorithm 1): forward,
// closed-form backward, and evaluation by given statistics. `eager.py` states the same operation by operation.
//
// A set is `runs` stretches of memory, worked on while they are in cache: each pass below goes over one set. Either a
// stretch is `length` elements of the one set and vector lanes are summed at the end, or (COLUMNS) neighbouring lanes
// belong to neighbouring sets and never meet, or meet at last where a set has a few neighbouring lanes. Lanes are summed
// in float over at most 256 vectors, then in double.

#include "vectors.h"

namespace {

// Loops from set to set and through a set, and how far a step moves, in elements: field by field `Axis` and `Geometry` of
// layout.py.
struct Axis { int64_t size, stride, affine; };
struct Geometry {
    int64_t columns;
    Axis outer, inner, runs, lane;
    int64_t affine_size, merge;
};

// Field by field `_COptions` of cpp.py.
struct Options { float step_factor, eps, noise_factor; uint32_t seed0, seed1; int has_noise, threads, half; };

enum { MEAN, VAR, RSTD, STEP, C1, C2, C3, C45, CV, SPREAD, FIELDS };  // rows of `stats`, a column a set

inline U mix(U key, int shift) { return key ^ (key >> shift); }

// See normal_numbers.py.
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
    int64_t base, affine, length, index, from = 0, to;  // `from` and `to` are the runs to walk
    double count;

    Set(const Geometry& geometry, int64_t number) : g(geometry), to(geometry.runs.size) {
        int64_t o = number / g.inner.size, i = number % g.inner.size;
        base = o * g.outer.stride + i * g.inner.stride;
        affine = i * g.inner.affine;
        int64_t block = W / g.merge * g.merge, left = g.lane.size - i * block;
        length = COLUMNS ? (left < block ? left : block) : g.lane.size;
        index = COLUMNS ? (o * g.lane.size + i * block) / g.merge : number;
        count = double(g.runs.size) * (COLUMNS ? g.merge : g.lane.size);
    }

    static int64_t room(const Geometry& g) { return g.runs.size * (COLUMNS ? W : (g.lane.size + W - 1) / W * W); }
    bool by_lane() const { return !COLUMNS && g.lane.affine; }
    int lanes() const { return COLUMNS ? int(length) : 1; }

    // body(offset, affine index, Full or Part); begin and end once a run, flush every so often
    template <class Begin, class Body, class End, class Flush>
    void walk(Begin begin, Body body, End end, Flush flush) const {
        int n = 0;
        for (int64_t r = from; r < to; r++) {
            int64_t offset = base + r * g.runs.stride, at = affine + r * g.runs.affine, l = 0;
            begin(at);
            for (; l + W <= length; l += W) {
                body(offset + l, at + (COLUMNS ? 0 : l * g.lane.affine), Full{});
                if (++n == 256) { flush(); n = 0; }
            }
            if (l < length) body(offset + l, at + (COLUMNS ? 0 : l * g.lane.affine), Part{int(length - l)});
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
        if (COLUMNS) __builtin_prefetch((const void*)(uintptr_t(p) + AHEAD * g.runs.stride * sizeof(P)));
    }

    V parameter(const float* p, int64_t at, float absent) const {  // one a run
        if (!p) return splat(absent);
        return COLUMNS && g.lane.affine ? load(p + at, Part{int(length)}) : splat(p[at]);
    }
    V field(const float* stats, int row, int64_t sets) const {
        const float* p = stats + row * sets + index;
        if (!COLUMNS) return splat(*p);
        if (g.merge == 1) return load(p, Part{int(length)});
        V v{};
        for (int i = 0; i < lanes(); i++) v[i] = p[i / g.merge];
        return v;
    }
    void put(float* stats, int row, int64_t sets, V v) const {
        float* p = stats + row * sets + index;
        if (g.merge == 1) return store(p, v, Part{lanes()});
        for (int i = 0; i < lanes(); i += int(g.merge)) p[i / g.merge] = v[i];
    }

    // The same in all lanes of a set: what `both` makes of their values.
    template <class L, class F> void meet(L& lane, F both) const {
        if (!COLUMNS || g.merge == 1) return;
        for (int i = 0; i < lanes(); i += int(g.merge)) {
            auto all = lane[i];
            for (int k = 1; k < g.merge; k++) all = both(all, lane[i + k]);
            for (int k = 0; k < g.merge; k++) lane[i + k] = all;
        }
    }
    template <class... Sums> void finish(Sums&... sums) const {
        (sums.finish(1 / count), ...);
        if (COLUMNS && g.merge > 1) (meet(sums), ...);
    }
    void meet(Sum<COLUMNS>& sum) const {
        double lane[W];
        for (int i = 0; i < W; i++) lane[i] = sum[i];
        meet(lane, [](double a, double b) { return a + b; });
        std::memcpy(&sum.low, lane, sizeof sum.low), std::memcpy(&sum.high, lane + HALF, sizeof sum.high);
    }
};

// Neighbouring sets that a thread works on together, pass by pass: of columns several, some rows of each in turn, so that
// memory is read in its order.
template <bool COLUMNS> struct Panel {
    static constexpr int MOST = COLUMNS ? 8 : 1, ROWS = 64;
    const Geometry& g;
    int64_t first;
    int count;

    template <class Work, class F> void each(Work* work, F f) const {
        for (int n = 0; n < count; n++) f(Set<COLUMNS>(g, first + n), work[n]);
    }
    template <class Work, class F> void sweep(Work* work, F f) const {
        int64_t rows = count > 1 ? ROWS : g.runs.size;
        for (int64_t from = 0; from < g.runs.size; from += rows)
            for (int n = 0; n < count; n++) {
                Set<COLUMNS> s(g, first + n);
                s.from = from, s.to = from + rows < g.runs.size ? from + rows : g.runs.size;
                f(s, work[n]);
            }
    }
};

struct Moments { double m1, m2, m3, m45, v, low, high; };

// power_transform.first_step and its gradient with respect to the moments; the constants come with the build
inline void newton(const Moments& m, float* out) {
    double v = 1 / (m.v < TINY ? TINY : m.v), ratio = m.m2 * v, slope = ratio - m.m1;
    double bend = (m.m45 - m.m3 * m.m3) * v, raw = bend - 2 * ratio * ratio;
    double curvature = 1 / (raw < MIN_CURVATURE ? MIN_CURVATURE : raw), step = -slope * curvature;
    bool free = std::fabs(step) * (m.high > -m.low ? m.high : -m.low) < LOG_STRETCH;  // as log1p(x) <= x
    if (!free) {
        double least = -LOG_STRETCH / std::log1p(-m.low < TINY ? TINY : -m.low);
        double most = LOG_STRETCH / std::log1p(m.high < TINY ? TINY : m.high);
        free = step >= least && step <= most;
        step = step < least ? least : step > most ? most : step;
    }
    double slopes = free ? -curvature : 0, curves = free && raw > MIN_CURVATURE ? slope * curvature * curvature : 0;
    out[STEP] = float(step);
    out[C1] = float(-slopes);
    out[C2] = float((slopes - 4 * curves * ratio) * v);
    out[C3] = float(-2 * curves * m.m3 * v);
    out[C45] = float(curves * v);
    out[CV] = float((-slopes * ratio - curves * bend + 4 * curves * ratio * ratio) * v);
}

template <bool COLUMNS> struct ForwardWork {
    V about, mean, var, rstd, low = splat(INFINITY), high = splat(-INFINITY), centre, noise_scale{};
    V found[FIELDS]{};
    Sum<COLUMNS> offset, power, m1, m2, m3, m45, v, total, deviation;
};

// The forward pass over a panel, in the steps of `eager.normalized`. They are inlined, so that what they share stays in
// registers. Inside a walk, what it adds up is local; `place` (backward: `shifts`, `directs`, `gamma`) goes on from run to run.
#define STEP_OF_PASS __attribute__((always_inline)) void

template <class T, bool COLUMNS> struct Forward {
    typedef Set<COLUMNS> One;
    typedef ForwardWork<COLUMNS> Work;
    static constexpr bool KEEP = sizeof(T) == 4;  // whether `out` can hold y until the noise's scale is known

    const Panel<COLUMNS>& panel;
    const int64_t sets;
    T* const out;
    const T* const x;
    const float *const weight, *const bias;
    float* const stats;
    const Options& o;
    Scratch& scratch;
    // The logarithms are kept for the transform: where a set is small aside, where it is large in `out`.
    const bool logs = One::room(panel.g) <= Scratch::ROOM;
    const bool logs_out = KEEP && !COLUMNS && !logs;
    float* place = scratch.first;
    Work work[Panel<COLUMNS>::MOST];

    STEP_OF_PASS run() {
        standardize();
        add_moments();
        finish_moments();
        if (o.has_noise) {
            add_values();
            finish_centre();
            add_distances();
            finish_spread();
        }
        write_result();
        each([&](const One& s, Work& w) {
            for (int f = 0; f < FIELDS; f++) s.put(stats, f, sets, w.found[f]);
        });
    }

    template <class F> STEP_OF_PASS each(F f) { panel.each(work, f); }
    template <class F> STEP_OF_PASS sweep(F f) { panel.sweep(work, f); }
    void rewind() { place = scratch.first; }

    // Mean and variance, about one of the set's own values, or, where that is far out or not finite, about 0 and then about
    // the mean.
    STEP_OF_PASS standardize() {
        each([&](const One& s, Work& w) {
            V own = load(x + s.base, Part{s.lanes()});
            s.meet(own, [](float a, float) { return a; });
            w.about = COLUMNS ? own : splat(own[0]);
        });
        bool near = false;
        for (int pass = 0; !near && pass < 3; pass++) {
            add_offsets();
            near = true;
            each([&](const One& s, Work& w) {
                bool enough = finish_variance(s, w);
                if (!enough) w.about = pass ? w.mean : V{}, near = false;
                w.offset = w.power = {};
            });
        }
    }
    STEP_OF_PASS add_offsets() {
        sweep([&](const One& s, Work& w) {
            V about = w.about;
            Sum<COLUMNS> offset = w.offset, power = w.power;
            s.walk([&](int64_t i, int64_t, auto k) {
                s.ahead(x + i);
                V c = keep(load(x + i, k) - about, k);
                offset.add(c), power.add(c * c);
            }, [&] { flush(offset, power); });
            w.offset = offset, w.power = power;
        });
    }
    // Whether that was near enough to the mean.
    __attribute__((always_inline)) bool finish_variance(const One& s, Work& w) {
        bool enough = true;
        s.finish(w.offset, w.power);
        for (int i = 0; i < (COLUMNS ? W : 1); i++) {
            double shift = w.offset[i], all = w.power[i] - shift * shift;
            enough = enough && shift * shift <= 16 * all;
            w.mean[i] = std::isinf(w.about[i]) ? w.about[i] : float(w.about[i] + shift);
            all = all < 0 ? 0 : all;
            w.var[i] = float(all);
            w.rstd[i] = float(1 / std::sqrt(all + o.eps));
        }
        if (!COLUMNS) w.mean = splat(w.mean[0]), w.var = splat(w.var[0]), w.rstd = splat(w.rstd[0]);
        return enough;
    }

    STEP_OF_PASS add_moments() {
        sweep([&](const One& s, Work& w) {
            V mean = w.mean, rstd = w.rstd, low = w.low, high = w.high;
            Sum<COLUMNS> m1 = w.m1, m2 = w.m2, m3 = w.m3, m45 = w.m45, v = w.v;
            s.walk([&](int64_t i, int64_t, auto k) {
                s.ahead(x + i);
                V h = keep((load(x + i, k) - mean) * rstd, k), a = absolute(h), log = log1p(a);
                if (logs) store(place, log, Full{}), place += W;
                else if constexpr (KEEP && !COLUMNS) { if (logs_out) store(out + i, log, k); }
                V grown = log + a * log, d = grown - a, e = grown * log - 2 * d;
                m1.add(signed_as(h, log)), m2.add(h * d), m3.add(d), m45.add(a * e + d * d), v.add(h * h);
                low = h < low ? h : low;  // a lane that holds no element holds 0, which the mean of the set is
                high = h > high ? h : high;
            }, [&] { flush(m1, m2, m3, m45, v); });
            w.m1 = m1, w.m2 = m2, w.m3 = m3, w.m45 = m45, w.v = v, w.low = low, w.high = high;
        });
    }
    STEP_OF_PASS finish_moments() {
        each([&](const One& s, Work& w) {
            s.finish(w.m1, w.m2, w.m3, w.m45, w.v);
            auto least = [](float a, float b) { return a < b ? a : b; };
            auto most = [](float a, float b) { return a > b ? a : b; };
            if (!COLUMNS) w.low[0] = folded(w.low, least), w.high[0] = folded(w.high, most);
            s.meet(w.low, least), s.meet(w.high, most);
            find_step(w);
        });
    }
    STEP_OF_PASS find_step(Work& w) {
        w.found[MEAN] = w.mean, w.found[VAR] = w.var, w.found[RSTD] = w.rstd;
        for (int i = 0; i < (COLUMNS ? W : 1); i++) {
            float row[FIELDS];
            newton({w.m1[i], w.m2[i], w.m3[i], w.m45[i], w.v[i], w.low[i], w.high[i]}, row);
            for (int f = STEP; f < SPREAD; f++) w.found[f][i] = row[f];
        }
        if (!COLUMNS) w.found[STEP] = splat(w.found[STEP][0]);
    }

    template <class K>
    __attribute__((always_inline)) V transform(const One& s, V mean, V rstd, const Transform& psi, int64_t i, K k) {
        s.ahead(x + i);
        V h = (load(x + i, k) - mean) * rstd, log;
        if (logs) log = load(place, Full{}), place += W;
        else if (logs_out) log = load(out + i, k);
        else log = log1p(absolute(h));
        return psi(h, expm1(psi.exponent(h, log)));
    }
    // What `add_values` may have left.
    template <class K>
    __attribute__((always_inline)) V y_at(const One& s, V mean, V rstd, const Transform& psi, int64_t i, K k) {
        if constexpr (KEEP) return s.ahead(out + i), load(out + i, k);
        else return transform(s, mean, rstd, psi, i, k);
    }

    STEP_OF_PASS add_values() {
        rewind();
        sweep([&](const One& s, Work& w) {
            V mean = w.mean, rstd = w.rstd;
            Transform psi(o.step_factor * w.found[STEP]);
            Sum<COLUMNS> total = w.total;
            s.walk([&](int64_t i, int64_t, auto k) {
                V y = transform(s, mean, rstd, psi, i, k);
                if constexpr (KEEP) s.ahead(out + i), store(out + i, y, k);
                total.add(keep(y, k));
            }, [&] { total.flush(); });
            w.total = total;
        });
    }
    STEP_OF_PASS finish_centre() {
        each([&](const One& s, Work& w) {
            s.finish(w.total);
            w.centre = w.total.value();
        });
    }
    STEP_OF_PASS add_distances() {
        rewind();
        sweep([&](const One& s, Work& w) {
            V mean = w.mean, rstd = w.rstd, centre = w.centre;
            Transform psi(o.step_factor * w.found[STEP]);
            Sum<COLUMNS> deviation = w.deviation;
            s.walk([&](int64_t i, int64_t, auto k) {
                deviation.add(keep(absolute(y_at(s, mean, rstd, psi, i, k) - centre), k));
            }, [&] { deviation.flush(); });
            w.deviation = deviation;
        });
    }
    STEP_OF_PASS finish_spread() {
        each([&](const One& s, Work& w) {
            s.finish(w.deviation);
            w.found[SPREAD] = w.deviation.value();
            w.noise_scale = o.noise_factor * w.found[SPREAD];
        });
    }

    STEP_OF_PASS write_result() {
        rewind();
        sweep([&](const One& s, const Work& w) {
            V mean = w.mean, rstd = w.rstd, noise_scale = w.noise_scale;
            Transform psi(o.step_factor * w.found[STEP]);
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
            if (o.has_noise)
                s.walk(begin, [&](int64_t i, int64_t at, auto k) {
                    put(i, at, k, y_at(s, mean, rstd, psi, i, k) + normal(i, o) * noise_scale);
                }, nothing, [] {});
            else
                s.walk(begin, [&](int64_t i, int64_t at, auto k) { put(i, at, k, transform(s, mean, rstd, psi, i, k)); },
                       nothing, [] {});
        });
    }
};

constexpr float SERIES[] = {1 / 5760.f, 1 / 840.f, 1 / 144.f, 1 / 30.f, 1 / 8.f, 1 / 3.f, 1 / 2.f};

template <bool COLUMNS> struct BackwardWork {
    Sum<COLUMNS> to_lmbda, d0, dh, s0, sh, w, b;
    V pull, centre, slope;
};

// What the forward kept of a set.
template <bool COLUMNS> struct Kept {
    V mean, rstd, c1, c2, c3, c45, cv, noise_scale;
    Transform psi;

    Kept(const Set<COLUMNS>& s, const float* stats, int64_t sets, const Options& o)
        : mean(s.field(stats, MEAN, sets)), rstd(s.field(stats, RSTD, sets)), c1(s.field(stats, C1, sets)),
          c2(s.field(stats, C2, sets)), c3(s.field(stats, C3, sets)), c45(s.field(stats, C45, sets)),
          cv(2 * s.field(stats, CV, sets)), noise_scale(o.has_noise ? o.noise_factor * s.field(stats, SPREAD, sets) : V{}),
          psi(o.step_factor * s.field(stats, STEP, sets)) {}

    V shift_of(V h, V a, V log, V inverse) const {  // count * d step / d h
        V both = a * log, grown = log + both, d = grown - a;
        V inner = grown * log - 2 * d + log * (both + 2 * d);
        return c1 * inverse + c2 * (d + both) + cv * h + signed_as(h, c45 * inner + c3 * log);
    }
};

// The backward pass over a panel, in the steps of `eager.pulled_back`.
template <class T, bool COLUMNS> struct Backward {
    typedef Set<COLUMNS> One;
    typedef BackwardWork<COLUMNS> Work;
    static constexpr bool KEEP = sizeof(T) == 4;  // whether `grad_x` can hold the direct part until the projections are known

    const Panel<COLUMNS>& panel;
    const int64_t sets;
    T* const grad_x;
    float *const grad_weight, *const grad_bias;
    const T *const x, *const grad;
    const float *const weight, *const stats;
    const Options& o;
    Scratch& scratch;
    // Whether a set is so small that its pulls are kept aside.
    const bool pulls = One::room(panel.g) <= Scratch::ROOM;
    float *shifts = scratch.first, *directs = scratch.second;
    V gamma = splat(1);
    Work work[Panel<COLUMNS>::MOST];

    STEP_OF_PASS run() {
        add_pulls();
        finish_sums();
        shifts = scratch.first, directs = scratch.second;
        panel.sweep(work, [&](const One& s, const Work& sum) {
            const Kept<COLUMNS> kept(s, stats, sets, o);
            if (pulls) write_kept_pulls(s, kept, sum);
            else write_pulls(s, kept, sum);
        });
    }

    STEP_OF_PASS begin(const One& s, int64_t at) {
        if (!s.by_lane()) gamma = s.parameter(weight, at, 1);
    }
    template <class K> __attribute__((always_inline)) V gain(const One& s, int64_t at, K k) const {
        return s.by_lane() && weight ? load(weight + at, k) : gamma;
    }

    // Sums of what the projections take means of, and of the gradients of gamma and beta.
    STEP_OF_PASS add_pulls() {
        panel.sweep(work, [&](const One& s, Work& sum) {
            const Kept<COLUMNS> kept(s, stats, sets, o);
            Sum<COLUMNS> to_lmbda = sum.to_lmbda, d0 = sum.d0, dh = sum.dh, s0 = sum.s0, sh = sum.sh, w = sum.w, b = sum.b;
            bool by_lane = s.by_lane(), runwise = !by_lane && s.g.runs.affine;
            s.walk([&](int64_t at) { begin(s, at); }, [&](int64_t i, int64_t at, auto k) {
                s.ahead(x + i), s.ahead(grad + i);
                V h = keep((load(x + i, k) - kept.mean) * kept.rstd, k), grad_y = load(grad + i, k);
                V a = absolute(h), log = log1p(a), u = kept.psi.exponent(h, log), growth = expm1(u), inverse = reciprocal(1 + a);
                V g = grad_y * gain(s, at, k), direct = g * ((growth + 1) * inverse);
                V shift = keep(kept.shift_of(h, a, log, inverse), k);
                V near = polynomial(u, SERIES), far = ((growth + 1) * u - growth) * reciprocal(u * u);
                to_lmbda.add(g * (log * log * (absolute(u) < 0.3f ? near : far)));
                d0.add(direct), dh.add(direct * h), s0.add(shift), sh.add(shift * h);
                if (pulls) {
                    store(shifts, shift, Full{}), store(directs, direct, Full{});
                    shifts += W, directs += W;
                } else if constexpr (KEEP) {
                    s.ahead(grad_x + i), store(grad_x + i, direct, k);
                }
                V y = kept.psi(h, growth);
                if (o.has_noise) y += normal(i, o) * kept.noise_scale;
                if (by_lane) {
                    store(grad_weight + at, load(grad_weight + at, k) + grad_y * y, k);
                    store(grad_bias + at, load(grad_bias + at, k) + grad_y, k);
                } else {
                    w.add(grad_y * y), b.add(grad_y);
                }
            }, [&](int64_t at) {
                if (!runwise) return;
                flush(w, b);
                grad_weight[at] += float(total_of(w.low + w.high)), grad_bias[at] += float(total_of(b.low + b.high));
                w = b = {};
            }, [&] {
                flush(to_lmbda, d0, dh, s0, sh, w, b);
            });
            sum.to_lmbda = to_lmbda, sum.d0 = d0, sum.dh = dh, sum.s0 = s0, sum.sh = sh, sum.w = w, sum.b = b;
        });
    }
    STEP_OF_PASS finish_sums() {
        panel.each(work, [&](const One& s, Work& sum) {
            if (!s.by_lane() && !s.g.runs.affine) add_to_affine(s, sum);
            s.finish(sum.to_lmbda, sum.d0, sum.dh, sum.s0, sum.sh);
            sum.pull = o.step_factor * sum.to_lmbda.value();
            sum.centre = sum.d0.value() + sum.pull * sum.s0.value(), sum.slope = sum.dh.value() + sum.pull * sum.sh.value();
        });
    }
    STEP_OF_PASS add_to_affine(const One& s, Work& sum) {
        finish(1, sum.w, sum.b);
        for (int i = 0; i < s.lanes(); i++) {
            int64_t at = s.affine + i * s.g.lane.affine;
            grad_weight[at] += float(sum.w[i]), grad_bias[at] += float(sum.b[i]);
        }
    }

    STEP_OF_PASS write_kept_pulls(const One& s, const Kept<COLUMNS>& kept, const Work& sum) {
        V pull = sum.pull, centre = sum.centre, slope = sum.slope;
        s.walk([&](int64_t i, int64_t, auto k) {
            s.ahead(x + i);
            V h = (load(x + i, k) - kept.mean) * kept.rstd, shift = load(shifts, Full{}), direct = load(directs, Full{});
            shifts += W, directs += W;
            store(grad_x + i, kept.rstd * (direct + pull * shift - centre - h * slope), k);
        }, [] {});
    }
    STEP_OF_PASS write_pulls(const One& s, const Kept<COLUMNS>& kept, const Work& sum) {
        V pull = sum.pull, centre = sum.centre, slope = sum.slope;
        s.walk([&](int64_t at) { begin(s, at); }, [&](int64_t i, int64_t at, auto k) {
            s.ahead(x + i);
            if (KEEP) s.ahead(grad_x + i);
            V h = (load(x + i, k) - kept.mean) * kept.rstd, a = absolute(h), log = log1p(a), inverse = reciprocal(1 + a), direct;
            if constexpr (KEEP) direct = load(grad_x + i, k);
            else direct = load(grad + i, k) * gain(s, at, k) * ((expm1(kept.psi.exponent(h, log)) + 1) * inverse);
            V shift = kept.shift_of(h, a, log, inverse);
            store(grad_x + i, kept.rstd * (direct + pull * shift - centre - h * slope), k);
        }, [](int64_t) {}, [] {});
    }
};

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
template <bool COLUMNS, class F> void each_panel(const Geometry& g, int threads, F f) {
    int64_t tasks = g.outer.size * g.inner.size, most = Set<COLUMNS>::room(g) <= Scratch::ROOM ? 1 : Panel<COLUMNS>::MOST;
    threads = tasks < threads ? int(tasks) : threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Scratch scratch;
        int64_t me = omp_get_thread_num(), all = omp_get_num_threads(), end = tasks * (me + 1) / all;
        for (int64_t n = tasks * me / all; n < end; n += most)
            f(Panel<COLUMNS>{g, n, int(end - n < most ? end - n : most)}, int(me), scratch);
    }
}

template <class F> void dispatch(int half, int columns, F f) {
    if (half) columns ? f(Bfloat16{}, std::true_type{}) : f(Bfloat16{}, std::false_type{});
    else columns ? f(0.0f, std::true_type{}) : f(0.0f, std::false_type{});
}

inline int64_t sets_of(const Geometry& g, bool columns) { return g.outer.size * (columns ? g.lane.size / g.merge : g.inner.size); }

}  // namespace

extern "C" {

int width() { return W; }

void forward(const Geometry* g, const Options* o, void* out, const void* x, const float* weight, const float* bias,
             float* stats) {
    dispatch(o->half, g->columns, [&](auto type, auto column) {
        typedef decltype(type) T;
        each_panel<column.value>(*g, o->threads, [&](auto panel, int, Scratch& scratch) {
            int64_t sets = sets_of(*g, column.value);
            Forward<T, column.value>{panel, sets, (T*)out, (const T*)x, weight, bias, stats, *o, scratch}.run();
        });
    });
}

// `shares` holds, a thread, the gradients of weight and bias of the sets it worked on: zero at first.
void backward(const Geometry* g, const Options* o, void* grad_x, float* shares, const void* x, const void* grad,
              const float* weight, const float* stats) {
    dispatch(o->half, g->columns, [&](auto type, auto column) {
        typedef decltype(type) T;
        each_panel<column.value>(*g, o->threads, [&](auto panel, int thread, Scratch& scratch) {
            float* share = shares + thread * 2 * g->affine_size;
            int64_t sets = sets_of(*g, column.value);
            Backward<T, column.value>{panel, sets, (T*)grad_x, share, share + g->affine_size, (const T*)x, (const T*)grad,
                                      weight, stats, *o, scratch}.run();
        });
    });
}

// `constants` has five rows, a column a set: mean, 1 / std, lambda - 1, gamma, beta.
void apply(const Geometry* g, const Options* o, void* out, const void* x, const float* constants) {
    dispatch(o->half, g->columns, [&](auto type, auto column) {
        typedef decltype(type) T;
        each_panel<column.value>(*g, o->threads, [&](auto panel, int, Scratch&) {
            int none[decltype(panel)::MOST];
            panel.sweep(none, [&](auto set, int) { apply_set<T>(set, sets_of(*g, column.value), (T*)out, (const T*)x, constants); });
        });
    });
}
}

/* The selective scan (formula: __init__.py). States are (d_state, d_inner), lanes last.
 *
 * A task is one row of the batch and one group of channels. It goes through the row in chunks of STEPS positions, and in
 * each chunk through its channels, LANES at a time. The forward pass keeps the state at each chunk's entry. The backward
 * pass goes through the chunks from the last to the first and recomputes the states of a chunk from its entry. Sums over
 * the channels of a group are written per group, sums over positions per row, and added up by the caller, so that results
 * do not depend on the number of threads.
 */
#include "cpp.h"

#define STEPS 32
#define GROUP (8 * LANES)

struct scan {
    int64_t threads, batch, length, d_inner, d_state;
    int64_t u_row, dt_row, B_row, C_row, z_row, grad_out_row;
    const io *u, *dt, *B, *C, *z;                 /* z may be null */
    const real *A, *D, *bias;                     /* A (d_state, d_inner); D and bias (d_inner) */
    const uint8_t *starts;                        /* (batch, length), 1 where the state is reset; may be null */
    io *out;                                      /* (batch, length, d_inner) */
    real *entries;                                /* (batch, chunks, d_state, d_inner); null when no gradient is wanted */
    real *state;                                  /* (batch, d_state, d_inner); the last state replaces the initial one */
    const io *grad_out;
    real *grad_state;                             /* (batch, d_state, d_inner); for the last state, then for the initial one */
    io *grad_u, *grad_dt, *grad_z;                /* (batch, length, d_inner) */
    real *grad_B, *grad_C;                        /* (groups, batch, length, d_state) */
    real *grad_A, *grad_D, *grad_bias;            /* (batch, d_state, d_inner), (batch, d_inner), (batch, d_inner) */
};

/* The place of a task: a row of the batch, `lanes` channels from `channel`, positions from `start`. */
struct place {
    int64_t row, start, channel;
    int steps, lanes;
};

/* The inputs of one chunk and one set of lanes. raw is dt + bias, delta is softplus(raw), and x is delta * u. */
struct tile {
    real u[STEPS][LANES], raw[STEPS][LANES], delta[STEPS][LANES], x[STEPS][LANES], z[STEPS][LANES];
    real D[LANES];
};

static int64_t at(const struct scan *s, struct place p, int t, int64_t row)
{
    return (p.row * s->length + p.start + t) * row + p.channel;
}

static int resets(const struct scan *s, struct place p, int t)
{
    return s->starts && s->starts[p.row * s->length + p.start + t];
}

static void load_tile(const struct scan *s, struct place p, struct tile *tile)
{
    real bias[LANES];
    load_real_lanes(bias, s->bias + p.channel, p.lanes);
    load_real_lanes(tile->D, s->D + p.channel, p.lanes);
    for (int t = 0; t < p.steps; t++) {
        load_lanes(tile->u[t], s->u + at(s, p, t, s->u_row), p.lanes);
        load_lanes(tile->raw[t], s->dt + at(s, p, t, s->dt_row), p.lanes);
        if (s->z) load_lanes(tile->z[t], s->z + at(s, p, t, s->z_row), p.lanes);
        FOR_LANES(i) {
            tile->raw[t][i] += bias[i];
            tile->delta[t][i] = softplus(tile->raw[t][i]);
            tile->x[t][i] = tile->delta[t][i] * tile->u[t][i];
        }
    }
}

/* Computes one position: h = exp2(delta A) h + x B, y = C . h. The argument A is already multiplied by log2(e). If `keep` is
 * not 0, the decay is written to `decay` for the backward pass; each call passes a constant as `keep`. Sums here and below
 * are local arrays whose address is passed nowhere: only then do compilers keep them in registers. */
static inline void step(int keep, int64_t d_state, const real *A, const real *delta, const real *x, const io *B, const io *C,
                        const real *before, real *after, real *decay, real *y)
{
    real sum[LANES] = { 0 };
    for (int64_t n = 0; n < d_state; n++) {
        const real b = from_io(B[n]), c = from_io(C[n]);
        FOR_LANES(i) {
            real a = fast_exp2(delta[i] * A[n * LANES + i]);
            real h = a * before[n * LANES + i] + x[i] * b;
            if (keep) decay[n * LANES + i] = a;
            after[n * LANES + i] = h;
            sum[i] += c * h;
        }
    }
    FOR_LANES(i) y[i] = sum[i];
}

static void load_A(const struct scan *s, struct place p, real *A, real scale)
{
    for (int64_t n = 0; n < s->d_state; n++)
        for (int i = 0; i < LANES; i++)
            A[n * LANES + i] = i < p.lanes ? scale * s->A[n * s->d_inner + p.channel + i] : 0;
}

static void copy_state(real *to, int64_t to_row, const real *from, int64_t from_row, int64_t d_state, int lanes)
{
    for (int64_t n = 0; n < d_state; n++) memcpy(to + n * to_row, from + n * from_row, lanes * sizeof(real));
}

static void forward_lanes(const struct scan *s, struct place p, real *scratch)
{
    const int64_t slab = s->d_state * LANES, chunks = (s->length + STEPS - 1) / STEPS;
    real *A = scratch, *h = A + slab;
    struct tile tile;
    real *state = s->state + p.row * s->d_state * s->d_inner + p.channel;
    load_A(s, p, A, (real)LOG2E);
    memset(h, 0, slab * sizeof(real));
    copy_state(h, LANES, state, s->d_inner, s->d_state, p.lanes);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        p.start = chunk * STEPS;
        p.steps = s->length - p.start < STEPS ? s->length - p.start : STEPS;
        load_tile(s, p, &tile);
        if (s->entries)
            copy_state(s->entries + (p.row * chunks + chunk) * s->d_state * s->d_inner + p.channel, s->d_inner, h, LANES,
                       s->d_state, p.lanes);
        for (int t = 0; t < p.steps; t++) {
            const int64_t position = p.row * s->length + p.start + t;
            real y[LANES];
            if (resets(s, p, t)) memset(h, 0, slab * sizeof(real));
            step(0, s->d_state, A, tile.delta[t], tile.x[t], s->B + position * s->B_row, s->C + position * s->C_row,
                 h, h, 0, y);
            FOR_LANES(i) y[i] += tile.D[i] * tile.u[t][i];
            if (s->z) {
                FOR_LANES(i) y[i] *= tile.z[t][i] * sigmoid(tile.z[t][i]);
            }
            store_lanes(s->out + at(s, p, t, s->d_inner), y, p.lanes);
        }
    }
    copy_state(state, s->d_inner, h, LANES, s->d_state, p.lanes);
}

/* Computes the backward pass of one chunk and one set of lanes. Adds to grad_B, grad_C (STEPS, d_state, LANES). */
static void backward_chunk(const struct scan *s, struct place p, real *scratch, real *grad_B, real *grad_C)
{
    const int64_t slab = s->d_state * LANES, chunks = (s->length + STEPS - 1) / STEPS;
    real *A = scratch, *grad_A = A + slab, *carried = grad_A + slab, *zeros = carried + slab, *entry = zeros + slab;
    real *states = entry + slab, *decays = states + STEPS * slab;
    const int64_t corner = p.row * s->d_state * s->d_inner + p.channel;
    struct tile tile;
    real y[STEPS][LANES], grad_D[LANES] = { 0 }, grad_bias[LANES] = { 0 };

    load_tile(s, p, &tile);
    load_A(s, p, A, (real)LOG2E);
    memset(grad_A, 0, 4 * slab * sizeof(real));
    copy_state(carried, LANES, s->grad_state + corner, s->d_inner, s->d_state, p.lanes);
    copy_state(entry, LANES,
               s->entries + (p.row * chunks + p.start / STEPS) * s->d_state * s->d_inner + p.channel, s->d_inner, s->d_state,
               p.lanes);
    for (int t = 0; t < p.steps; t++) {
        const int64_t position = p.row * s->length + p.start + t;
        step(1, s->d_state, A, tile.delta[t], tile.x[t], s->B + position * s->B_row, s->C + position * s->C_row,
             resets(s, p, t) ? zeros : states + (t - 1) * slab, states + t * slab, decays + t * slab, y[t]);
    }
    load_A(s, p, A, 1);
    for (int t = p.steps - 1; t >= 0; t--) {
        const int64_t position = p.row * s->length + p.start + t;
        const io *B = s->B + position * s->B_row, *C = s->C + position * s->C_row;
        const real *before = resets(s, p, t) ? zeros : states + (t - 1) * slab;
        real *after = states + t * slab, *decay = decays + t * slab;
        real grad_y[LANES], grad_u[LANES], grad_delta[LANES], sum_x[LANES] = { 0 }, sum_delta[LANES] = { 0 };
        load_lanes(grad_y, s->grad_out + at(s, p, t, s->grad_out_row), p.lanes);
        if (s->z) {
            real grad_z[LANES];
            FOR_LANES(i) {
                real z = tile.z[t][i], gate = sigmoid(z), ungated = y[t][i] + tile.D[i] * tile.u[t][i];
                grad_z[i] = grad_y[i] * ungated * gate * (1 + z * (1 - gate));
                grad_y[i] *= z * gate;
            }
            store_lanes(s->grad_z + at(s, p, t, s->d_inner), grad_z, p.lanes);
        }
        for (int64_t n = 0; n < s->d_state; n++) {
            const real b = from_io(B[n]), c = from_io(C[n]);
            FOR_LANES(i) {
                const int64_t k = n * LANES + i;
                real g = carried[k] + grad_y[i] * c; /* the gradient of h[t] */
                real behind = g * decay[k], through_decay = behind * before[k];
                grad_C[t * slab + k] += grad_y[i] * after[k];
                grad_B[t * slab + k] += g * tile.x[t][i];
                sum_x[i] += g * b;
                sum_delta[i] += through_decay * A[k];
                grad_A[k] += through_decay * tile.delta[t][i];
                carried[k] = behind;
            }
        }
        if (resets(s, p, t)) memset(carried, 0, slab * sizeof(real));
        FOR_LANES(i) {
            grad_u[i] = sum_x[i] * tile.delta[t][i] + grad_y[i] * tile.D[i];
            grad_D[i] += grad_y[i] * tile.u[t][i];
            grad_delta[i] = (sum_delta[i] + sum_x[i] * tile.u[t][i]) * sigmoid(tile.raw[t][i]);
            grad_bias[i] += grad_delta[i];
        }
        store_lanes(s->grad_u + at(s, p, t, s->d_inner), grad_u, p.lanes);
        store_lanes(s->grad_dt + at(s, p, t, s->d_inner), grad_delta, p.lanes);
    }
    copy_state(s->grad_state + corner, s->d_inner, carried, LANES, s->d_state, p.lanes);
    for (int64_t n = 0; n < s->d_state; n++)
        for (int i = 0; i < p.lanes; i++) s->grad_A[corner + n * s->d_inner + i] += grad_A[n * LANES + i];
    for (int i = 0; i < p.lanes; i++) {
        s->grad_D[p.row * s->d_inner + p.channel + i] += grad_D[i];
        s->grad_bias[p.row * s->d_inner + p.channel + i] += grad_bias[i];
    }
}

/* Sums over the lanes, (count, LANES) -> (count). */
static void sum_lanes(real *to, real *values, int64_t count)
{
    for (int64_t k = 0; k < count; k++, values += LANES) {
        real sums[4] = { 0 };
        for (int i = 0; i < LANES; i += 4)
            for (int j = 0; j < 4; j++) sums[j] += values[i + j];
        to[k] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
}

static void backward_group(const struct scan *s, int64_t row, int64_t group, real *scratch)
{
    const int64_t slab = s->d_state * LANES, chunks = (s->length + STEPS - 1) / STEPS;
    real *grad_B = scratch, *grad_C = grad_B + STEPS * slab, *rest = grad_C + STEPS * slab;
    const int64_t first = group * GROUP, end = first + GROUP < s->d_inner ? first + GROUP : s->d_inner;
    for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
        struct place p = { row, chunk * STEPS, 0, STEPS, LANES };
        if (s->length - p.start < STEPS) p.steps = s->length - p.start;
        memset(grad_B, 0, 2 * STEPS * slab * sizeof(real));
        for (p.channel = first; p.channel < end; p.channel += LANES) {
            p.lanes = end - p.channel < LANES ? end - p.channel : LANES;
            backward_chunk(s, p, rest, grad_B, grad_C);
        }
        const int64_t corner = ((group * s->batch + row) * s->length + p.start) * s->d_state;
        sum_lanes(s->grad_B + corner, grad_B, p.steps * s->d_state);
        sum_lanes(s->grad_C + corner, grad_C, p.steps * s->d_state);
    }
}

int64_t scan_steps(void) { return STEPS; }
int64_t scan_group(void) { return GROUP; }

/* Both functions return 0, or 1 if there is not enough memory. */
int scan_forward(const struct scan *s)
{
    const int64_t blocks = (s->d_inner + LANES - 1) / LANES;
    int failed = 0;
#pragma omp parallel num_threads(s->threads) reduction(| : failed)
    {
        const unsigned mode = flush_denormals();
        real *scratch = aligned_alloc(64, 2 * s->d_state * LANES * sizeof(real));
        failed = !scratch;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s->batch * blocks; task++) {
            struct place p = { task / blocks, 0, task % blocks * LANES, 0, LANES };
            if (s->d_inner - p.channel < LANES) p.lanes = s->d_inner - p.channel;
            if (scratch) forward_lanes(s, p, scratch);
        }
        free(scratch);
        restore_denormals(mode);
    }
    return failed;
}

int scan_backward(const struct scan *s)
{
    const int64_t groups = (s->d_inner + GROUP - 1) / GROUP, slab = s->d_state * LANES;
    int failed = 0;
#pragma omp parallel num_threads(s->threads) reduction(| : failed)
    {
        const unsigned mode = flush_denormals();
        real *scratch = aligned_alloc(64, (4 * STEPS + 5) * slab * sizeof(real));
        failed = !scratch;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s->batch * groups; task++)
            if (scratch) backward_group(s, task / groups, task % groups, scratch);
        free(scratch);
        restore_denormals(mode);
    }
    return failed;
}

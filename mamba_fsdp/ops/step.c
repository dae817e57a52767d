/* One position of a whole model of Mamba-1 and Mamba-2 blocks, each with an MLP or without, for generation (model/lm.py;
 * the formulas: scan/__init__.py, ssd/__init__.py). All threads go through all of it; a loop that they share ends with a
 * barrier. Scratch is (batch, wide) with as many channels in use as there are.
 */
#include "cpp.h"

/* Rows of a matrix are worked on ROWS at a time, in vectors of LANES. */
#define FOUR(i) _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
#define ROWS (4 * LANES)
typedef real lanes __attribute__((vector_size(LANES * sizeof(real)), aligned(sizeof(real))));

struct layer { /* 0 is what the layer lacks */
    int64_t heads, mlp;                                  /* of Mamba-2; the width of the MLP */
    const real *norm, *in_proj, *taps, *conv_bias;       /* taps (width, channels), the last one for this position */
    const real *x_proj, *dt_proj, *dt_bias, *A, *D;      /* A is negative and times log2(e) */
    const real *gated_norm, *out_proj, *norm2, *fc1, *fc2;
    real *conv, *ssm;                                    /* as model/layers.py, but (.., d_state, channels) */
};

struct model {
    int64_t threads, batch, layers, d_model, d_inner, d_state, width, rank, groups, vocabulary, wide;
    const int64_t *tokens;
    const struct layer *layer;
    const real *eps, *embedding, *norm_f, *lm_head;
    real *scratch, *logits; /* (6, batch, wide), (batch, vocabulary) */
};

/* out (batch, rows), `out_row` apart, = x (batch, columns), `x_row` apart, times weight transposed, which is packed:
 * (rows / ROWS rounded up, columns, ROWS). So no sum runs over lanes. */
static void product(const struct model *m, real *out, int64_t out_row, const real *x, int64_t x_row,
                    const real *weight, int64_t rows, int64_t columns)
{
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row += ROWS) {
        const int64_t left = rows - row < ROWS ? rows - row : ROWS;
        for (int64_t b = 0; b < m->batch; b += 4) { /* four at a time, the last one maybe again */
            lanes sum[4][4] = {{{0}}};
            const real *v[4];
            for (int i = 0; i < 4; i++) v[i] = x + (b + i < m->batch ? b + i : m->batch - 1) * x_row;
            const lanes *w = (const lanes *)(weight + row * columns);
            if (m->batch == 1) {
                for (int64_t c = 0; c < columns; c++, w += 4) FOUR(k) sum[0][k] += v[0][c] * w[k];
            } else {
                for (int64_t c = 0; c < columns; c++, w += 4) FOUR(i) FOUR(k) sum[i][k] += v[i][c] * w[k];
            }
            for (int i = 0; i < 4 && b + i < m->batch; i++)
                memcpy(out + (b + i) * out_row + row, sum[i], left * sizeof(real));
        }
    }
}

/* One row: out = x normed, times weight. */
static void rms_norm(const struct model *m, real *out, const real *x, const real *weight, int64_t channels)
{
    real squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < channels; c++) squares += x[c] * x[c];
    const real scale = 1 / (real)sqrt(squares / channels + *m->eps);
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) out[c] = x[c] * scale * weight[c];
}

/* residual += hidden, which then is its norm. */
static void add_norm(const struct model *m, real *hidden, real *residual, const real *weight)
{
#pragma omp for
    for (int64_t b = 0; b < m->batch; b++) {
        real *h = hidden + b * m->wide, *r = residual + b * m->wide;
        for (int64_t c = 0; c < m->d_model; c++) r[c] += h[c];
        rms_norm(m, h, r, weight, m->d_model);
    }
}

/* The convolution with SiLU; the state moves on by x (batch, channels). */
static void convolve(const struct model *m, const struct layer *l, real *restrict out, const real *x, int64_t channels)
{
    const int64_t past = m->width - 1;
#pragma omp for
    for (int64_t b = 0; b < m->batch; b++) {
        real *state = l->conv + b * past * channels, *y = out + b * m->wide;
        const real *now = x + b * m->wide;
        memcpy(y, l->conv_bias, channels * sizeof(real));
        for (int64_t k = 0; k <= past; k++) {
            const real *at = k < past ? state + k * channels : now, *tap = l->taps + k * channels;
#pragma omp simd
            for (int64_t c = 0; c < channels; c++) y[c] += at[c] * tap[c];
        }
#pragma omp simd
        for (int64_t c = 0; c < channels; c++) y[c] *= sigmoid(y[c]);
        memmove(state, state + channels, (past - 1) * channels * sizeof(real));
        memcpy(state + (past - 1) * channels, now, channels * sizeof(real));
    }
}

/* x times silu(z) */
static void gate(real *restrict x, const real *restrict z, int64_t channels)
{
#pragma omp simd
    for (int64_t c = 0; c < channels; c++) x[c] *= z[c] * sigmoid(z[c]);
}

/* y += h . C, where h (d_state, channels), `row` apart, becomes decay * h + x * B. decay: of all, or of each by its delta
 * and A, which is `row` apart too. */
static inline void advance(const struct model *m, real *restrict y, real *restrict h, int64_t row, const real *restrict x,
                           const real *restrict decay, const real *A, const real *B, const real *C, int64_t channels)
{
    for (int64_t s = 0; s < m->d_state; s++, h += row) {
        const real *a = A + s * row, in = B[s], out = C[s];
#pragma omp simd
        for (int64_t c = 0; c < channels; c++) {
            h[c] = h[c] * (A ? fast_exp2(decay[c] * a[c]) : *decay) + x[c] * in;
            y[c] += h[c] * out;
        }
    }
}

/* hidden (batch, d_model) through a Mamba-1 mixer. */
static void mamba1(const struct model *m, const struct layer *l, real *hidden, real *const *part)
{
    const int64_t inner = m->d_inner, states = m->d_state, wide = m->wide, rows = m->rank + 2 * states;
    real *xz = part[0], *u = part[1], *dbc = part[2], *dt = part[3];
    product(m, xz, wide, hidden, wide, l->in_proj, 2 * inner, m->d_model);
    convolve(m, l, u, xz, inner);
    product(m, dbc, wide, u, wide, l->x_proj, rows, inner);
    product(m, dt, wide, dbc, wide, l->dt_proj, inner, m->rank);
#pragma omp for collapse(2)
    for (int64_t b = 0; b < m->batch; b++) {
        for (int64_t first = 0; first < inner; first += ROWS) {
            const int64_t count = inner - first < ROWS ? inner - first : ROWS;
            const real *bias = l->dt_bias + first, *D = l->D + first, *B = dbc + b * wide + m->rank;
            real *x = u + b * wide + first, *delta = dt + b * wide + first, *y = xz + b * wide + first;
#pragma omp simd
            for (int64_t c = 0; c < count; c++) {
                delta[c] = softplus(delta[c] + bias[c]);
                y[c] = D[c] * x[c];
                x[c] *= delta[c];
            }
            advance(m, y, l->ssm + b * inner * states + first, inner, x, delta, l->A + first, B, B + states, count);
            gate(y, y + inner, count);
        }
    }
    product(m, hidden, wide, xz, wide, l->out_proj, m->d_model, inner);
}

/* hidden (batch, d_model) through a Mamba-2 mixer. */
static void mamba2(const struct model *m, const struct layer *l, real *hidden, real *const *part)
{
    const int64_t inner = m->d_inner, states = m->d_state, wide = m->wide, heads = l->heads, size = inner / heads;
    const int64_t channels = inner + 2 * m->groups * states, group = inner / m->groups;
    real *all = part[0], *x = part[1], *y = part[2];
    product(m, all, wide, hidden, wide, l->in_proj, inner + channels + heads, m->d_model);
    convolve(m, l, x, all + inner, channels);
#pragma omp for collapse(2)
    for (int64_t b = 0; b < m->batch; b++) {
        for (int64_t head = 0; head < heads; head++) {
            const int64_t first = head * size;
            const real delta = softplus(all[b * wide + inner + channels + head] + l->dt_bias[head]);
            const real decay = fast_exp2(delta * l->A[head]);
            const real *B = x + b * wide + inner + first / group * states, *C = B + m->groups * states;
            real *in = x + b * wide + first, *out = y + b * wide + first;
#pragma omp simd
            for (int64_t c = 0; c < size; c++) {
                out[c] = l->D[head] * in[c];
                in[c] *= delta;
            }
            advance(m, out, l->ssm + (b * inner + first) * states, size, in, &decay, 0, B, C, size);
            gate(out, all + b * wide + first, size);
        }
    }
#pragma omp for collapse(2)
    for (int64_t b = 0; b < m->batch; b++)
        for (int64_t g = 0; g < m->groups; g++) {
            real *at = y + b * wide + g * group;
            rms_norm(m, at, at, l->gated_norm + g * group, group);
        }
    product(m, hidden, wide, y, wide, l->out_proj, m->d_model, inner);
}

static void mlp(const struct model *m, const struct layer *l, real *hidden, real *const *part)
{
    real *y = part[0];
    product(m, y, m->wide, hidden, m->wide, l->fc1, 2 * l->mlp, m->d_model);
#pragma omp for
    for (int64_t b = 0; b < m->batch; b++) gate(y + b * m->wide, y + b * m->wide + l->mlp, l->mlp);
    product(m, hidden, m->wide, y, m->wide, l->fc2, m->d_model, l->mlp);
}

/* tokens (batch) -> logits (batch, vocabulary); the state of the layers moves on by one position. */
int model_step(const struct model *m)
{
    real *part[6];
    for (int i = 0; i < 6; i++) part[i] = m->scratch + i * m->batch * m->wide;
    real *hidden = part[4], *residual = part[5];
    for (int64_t b = 0; b < m->batch; b++) {
        memcpy(hidden + b * m->wide, m->embedding + m->tokens[b] * m->d_model, m->d_model * sizeof(real));
        memset(residual + b * m->wide, 0, m->d_model * sizeof(real));
    }
#pragma omp parallel num_threads(m->threads)
    {
        const unsigned mode = flush_denormals();
        for (const struct layer *l = m->layer; l < m->layer + m->layers; l++) {
            add_norm(m, hidden, residual, l->norm);
            (l->heads ? mamba2 : mamba1)(m, l, hidden, part);
            if (!l->mlp) continue;
            add_norm(m, hidden, residual, l->norm2);
            mlp(m, l, hidden, part);
        }
        add_norm(m, hidden, residual, m->norm_f);
        product(m, m->logits, m->vocabulary, hidden, m->wide, m->lm_head, m->vocabulary, m->d_model);
        restore_denormals(mode);
    }
    return 0;
}

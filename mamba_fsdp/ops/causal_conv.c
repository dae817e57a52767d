/* The causal convolution with SiLU of causal_conv.py, which holds its formula. A task is one row of the batch and STEPS
 * positions, all channels. Gradients of weight and bias are written per task and added up by the caller: so results do not
 * depend on the number of threads.
 */
#include "native.h"

#define STEPS 64
#define MAX_WIDTH 8

struct conv {
    int64_t threads, batch, length, channels, width;
    int64_t x_row, grad_row;
    const io *x;
    const real *taps, *bias;      /* taps (width, channels), the last one for the current position */
    const uint8_t *visible;       /* (batch, length) earlier positions that count, at most width - 1; null: all of the row */
    io *out;                      /* (batch, length, channels) */
    const io *grad_out;
    io *grad_x;                   /* (batch, length, channels) */
    real *grad_taps;              /* (batch * blocks, width + 1, channels), the bias last */
};

static int visible(const struct conv *s, int64_t row, int64_t t)
{
    if (s->visible) return s->visible[row * s->length + t];
    return t < s->width - 1 ? t : s->width - 1;
}

/* The convolution before SiLU at one position, `lanes` channels from `channel`. */
static inline void convolve(const struct conv *s, int64_t row, int64_t t, int64_t channel, int lanes, real *out)
{
    const int count = visible(s, row, t);
    real x[LANES], tap[LANES];
    load_real_lanes(out, s->bias + channel, lanes);
    for (int k = 0; k <= count; k++) {
        load_lanes(x, s->x + (row * s->length + t - k) * s->x_row + channel, lanes);
        load_real_lanes(tap, s->taps + (s->width - 1 - k) * s->channels + channel, lanes);
        FOR_LANES(i) out[i] += x[i] * tap[i];
    }
}

static void forward_block(const struct conv *s, int64_t row, int64_t start, int64_t end)
{
    for (int64_t t = start; t < end; t++)
        for (int64_t channel = 0; channel < s->channels; channel += LANES) {
            const int lanes = s->channels - channel < LANES ? s->channels - channel : LANES;
            real out[LANES];
            convolve(s, row, t, channel, lanes, out);
            FOR_LANES(i) out[i] *= sigmoid(out[i]);
            store_lanes(s->out + (row * s->length + t) * s->channels + channel, out, lanes);
        }
}

/* A position's gradient reaches the inputs up to width - 1 before it, so the last ones of the block ask for the first
 * positions behind the block too; their part in the gradient of the taps belongs to the next block. */
static void backward_block(const struct conv *s, int64_t row, int64_t start, int64_t end, real *grad_taps)
{
    const int64_t reach = end + s->width - 1 < s->length ? end + s->width - 1 : s->length;
    for (int64_t channel = 0; channel < s->channels; channel += LANES) {
        const int lanes = s->channels - channel < LANES ? s->channels - channel : LANES;
        real taps[MAX_WIDTH][LANES], sums[MAX_WIDTH + 1][LANES] = { 0 }, pending[MAX_WIDTH][LANES] = { 0 };
        for (int k = 0; k < s->width; k++)
            load_real_lanes(taps[k], s->taps + (s->width - 1 - k) * s->channels + channel, lanes);
        /* pending[k] gathers the gradient of x[t - k]; it is whole when k reaches width - 1. */
        for (int64_t t = start; t < reach + s->width - 1; t++) {
            real grad[LANES] = { 0 };
            int count = -1;
            for (int k = s->width - 1; k > 0; k--) memcpy(pending[k], pending[k - 1], sizeof pending[k]);
            memset(pending[0], 0, sizeof pending[0]);
            if (t < reach) {
                real out[LANES];
                count = visible(s, row, t);
                convolve(s, row, t, channel, lanes, out);
                load_lanes(grad, s->grad_out + (row * s->length + t) * s->grad_row + channel, lanes);
                FOR_LANES(i) {
                    real gate = sigmoid(out[i]);
                    grad[i] *= gate * (1 + out[i] * (1 - gate));
                }
            }
            for (int k = 0; k <= count; k++) {
                FOR_LANES(i) pending[k][i] += grad[i] * taps[k][i];
                if (t < end) {
                    real x[LANES];
                    load_lanes(x, s->x + (row * s->length + t - k) * s->x_row + channel, lanes);
                    FOR_LANES(i) sums[s->width - 1 - k][i] += grad[i] * x[i];
                }
            }
            if (t < end) {
                FOR_LANES(i) sums[s->width][i] += grad[i];
            }
            const int64_t done = t - (s->width - 1);
            if (done >= start && done < end)
                store_lanes(s->grad_x + (row * s->length + done) * s->channels + channel, pending[s->width - 1], lanes);
        }
        for (int k = 0; k <= s->width; k++) memcpy(grad_taps + k * s->channels + channel, sums[k], lanes * sizeof(real));
    }
}

int64_t conv_steps(void) { return STEPS; }

static int each_block(const struct conv *s, int backward)
{
    const int64_t blocks = (s->length + STEPS - 1) / STEPS;
#pragma omp parallel num_threads(s->threads)
    {
        const unsigned mode = flush_denormals();
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s->batch * blocks; task++) {
            const int64_t row = task / blocks, start = task % blocks * STEPS;
            const int64_t end = start + STEPS < s->length ? start + STEPS : s->length;
            if (backward) backward_block(s, row, start, end, s->grad_taps + task * (s->width + 1) * s->channels);
            else forward_block(s, row, start, end);
        }
        restore_denormals(mode);
    }
    return 0;
}

int conv_forward(const struct conv *s) { return each_block(s, 0); }
int conv_backward(const struct conv *s) { return each_block(s, 1); }

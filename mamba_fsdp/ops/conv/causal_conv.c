/* The causal convolution with SiLU (formula: __init__.py). A task is one row of the batch and STEPS positions with all
 * channels. Gradients of weight and bias are written per task and added up by the caller, so that results do not depend on
 * the number of threads.
 */
#include "cpp.h"

#define STEPS 64

struct conv {
    int64_t threads, batch, length, channels, width;
    int64_t x_row, grad_out_row;
    const io *x;
    const real *taps, *bias;      /* taps (width, channels), the last one for the current position */
    const uint8_t *visible;       /* (batch, length): how many earlier positions count, at most width - 1; null: all of the row */
    io *out;                      /* (batch, length, channels) */
    const io *grad_out;
    io *grad_x;                   /* (batch, length, channels) */
    real *grad_taps;              /* (batch * blocks, width + 1, channels); the last row is for the bias */
};

static int visible(const struct conv *s, int64_t row, int64_t t)
{
    if (s->visible) return s->visible[row * s->length + t];
    return t < s->width - 1 ? t : s->width - 1;
}

static const io *input(const struct conv *s, int64_t row, int64_t t) { return s->x + (row * s->length + t) * s->x_row; }

/* Returns the taps by which position t - k is multiplied. */
static const real *taps(const struct conv *s, int k) { return s->taps + (s->width - 1 - k) * s->channels; }

/* Writes the output before SiLU at one position to `out` (channels). */
static void convolve(const struct conv *s, int64_t row, int64_t t, real *restrict out)
{
    const int count = visible(s, row, t);
    memcpy(out, s->bias, s->channels * sizeof(real));
    for (int k = 0; k <= count; k++) {
        const io *x = input(s, row, t - k);
        const real *tap = taps(s, k);
#pragma omp simd
        for (int64_t c = 0; c < s->channels; c++) out[c] += from_io(x[c]) * tap[c];
    }
}

static void forward_block(const struct conv *s, int64_t row, int64_t start, int64_t end, real *restrict pre)
{
    for (int64_t t = start; t < end; t++) {
        io *out = s->out + (row * s->length + t) * s->channels;
        convolve(s, row, t, pre);
#pragma omp simd
        for (int64_t c = 0; c < s->channels; c++) out[c] = to_io(pre[c] * sigmoid(pre[c]));
    }
}

/* Computes the gradients of one block. A position's gradient reaches inputs up to width - 1 before it, so that the block's
 * last inputs need the first positions after the block too; these add to the taps' gradient only in the next block. `ring`
 * is (width, channels): row t % width sums the gradient of x[t], which is complete once t + width - 1 has added its part. */
static void backward_block(const struct conv *s, int64_t row, int64_t start, int64_t end, real *restrict grad,
                           real *restrict ring, real *restrict grad_taps)
{
    const int64_t channels = s->channels, width = s->width;
    real *restrict grad_bias = grad_taps + width * channels;
    memset(grad_taps, 0, (width + 1) * channels * sizeof(real));
    memset(ring, 0, width * channels * sizeof(real));
    for (int64_t t = start; t < end + width - 1; t++) {
        if (t < s->length) {
            const io *grad_out = s->grad_out + (row * s->length + t) * s->grad_out_row;
            convolve(s, row, t, grad);
#pragma omp simd
            for (int64_t c = 0; c < channels; c++) {
                real pre = grad[c], gate = sigmoid(pre);
                grad[c] = from_io(grad_out[c]) * gate * (1 + pre * (1 - gate));
            }
            for (int k = 0; k <= visible(s, row, t); k++) {
                const real *tap = taps(s, k);
                if (t - k >= start) { /* the previous block computes the gradients of earlier inputs */
                    real *restrict grad_x = ring + (t - k) % width * channels;
#pragma omp simd
                    for (int64_t c = 0; c < channels; c++) grad_x[c] += grad[c] * tap[c];
                }
                if (t < end) {
                    const io *x = input(s, row, t - k);
                    real *restrict sum = grad_taps + (width - 1 - k) * channels;
#pragma omp simd
                    for (int64_t c = 0; c < channels; c++) sum[c] += grad[c] * from_io(x[c]);
                }
            }
            if (t < end) {
#pragma omp simd
                for (int64_t c = 0; c < channels; c++) grad_bias[c] += grad[c];
            }
        }
        const int64_t done = t - (width - 1);
        if (done >= start) {
            io *grad_x = s->grad_x + (row * s->length + done) * channels;
            real *restrict whole = ring + done % width * channels;
            for (int64_t c = 0; c < channels; c++) grad_x[c] = to_io(whole[c]);
            memset(whole, 0, channels * sizeof(real));
        }
    }
}

int64_t conv_steps(void) { return STEPS; }

/* Returns 0, or 1 if there is not enough memory. */
static int each_block(const struct conv *s, int backward)
{
    const int64_t blocks = (s->length + STEPS - 1) / STEPS;
    int failed = 0;
#pragma omp parallel num_threads(s->threads) reduction(| : failed)
    {
        const unsigned mode = flush_denormals();
        real *scratch = malloc((s->width + 1) * s->channels * sizeof(real));
        failed = !scratch;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s->batch * blocks; task++) {
            const int64_t row = task / blocks, start = task % blocks * STEPS;
            const int64_t end = start + STEPS < s->length ? start + STEPS : s->length;
            if (!scratch) continue;
            if (backward)
                backward_block(s, row, start, end, scratch, scratch + s->channels,
                               s->grad_taps + task * (s->width + 1) * s->channels);
            else
                forward_block(s, row, start, end, scratch);
        }
        free(scratch);
        restore_denormals(mode);
    }
    return failed;
}

int conv_forward(const struct conv *s) { return each_block(s, 0); }
int conv_backward(const struct conv *s) { return each_block(s, 1); }

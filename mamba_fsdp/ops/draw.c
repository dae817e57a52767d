/* Tokens drawn from logits, one a row (model/generate.py). Nothing is sorted: the least probability that is kept is found
 * by halving between the bits of two floats, whose order is that of the numbers.
 */
#include <float.h>

#include "cpp.h"

#define BLOCK 64
typedef union { int32_t bits; float value; } number;

static double sum(const float *p, int64_t count)
{
    double all = 0;
#pragma omp simd reduction(+ : all)
    for (int64_t i = 0; i < count; i++) all += p[i];
    return all;
}

/* Whether all that is likelier than `least` is fewer than `most` and less than `mass`; both become what is left. */
static int wanted(const float *p, int64_t count, float least, int64_t *most, float *mass)
{
    int32_t above = 0;
    float before = 0;
#pragma omp simd reduction(+ : above, before)
    for (int64_t i = 0; i < count; i++) {
        above += p[i] > least;
        before += p[i] > least ? p[i] : 0;
    }
    return (*most -= above) > 0 && (*mass -= before) > 0;
}

/* Sets to 0 all but the likeliest: `most` of them, no more than it takes to make up `mass`. The likeliest is 1. */
static void keep_likeliest(float *p, int64_t count, int64_t most, float mass)
{
    number low = { 0 }, high = { .value = 1 };
    while (low.bits < high.bits) {
        const number middle = { (low.bits + high.bits) / 2 };
        int64_t most_left = most;
        float mass_left = mass;
        if (wanted(p, count, middle.value, &most_left, &mass_left)) high = middle;
        else low.bits = middle.bits + 1;
    }
    wanted(p, count, high.value, &most, &mass);
    for (int64_t i = 0; i < count; i++) {
        if (p[i] == high.value && most > 0 && mass > 0) most--, mass -= p[i]; /* of several alike the first ones */
        else if (p[i] <= high.value) p[i] = 0;
    }
}

/* tokens (rows) from logits (rows, count), `row` apart; uniform (rows) in [0, 1), p (count) scratch. Returns 1 where a
 * logit is not finite. */
int draw(int64_t rows, int64_t count, int64_t row, const float *logits, double temperature, int64_t top_k, double top_p,
         const double *uniform, float *p, int64_t *tokens)
{
    const float scale = 1.44269504 / (temperature > 1e-6 ? temperature : 1e-6);
    for (int64_t r = 0; r < rows; r++, logits += row) {
        float highest = logits[0], zeros = 0; /* a NaN, where a logit is infinite or one */
#pragma omp simd reduction(max : highest) reduction(+ : zeros)
        for (int64_t i = 0; i < count; i++) {
            highest = logits[i] > highest ? logits[i] : highest;
            zeros += logits[i] * 0;
        }
        if (zeros != 0) return 1;
        if (temperature == 0) {
            for (tokens[r] = 0; logits[tokens[r]] < highest; tokens[r]++) {}
            continue;
        }
#pragma omp simd
        for (int64_t i = 0; i < count; i++) p[i] = fast_exp2((logits[i] - highest) * scale);
        if (top_k || top_p < 1) {
            const double mass = top_p < 1 ? top_p * sum(p, count) : INFINITY;
            keep_likeliest(p, count, top_k ? top_k : count, mass > FLT_MIN ? mass : FLT_MIN);
        }
        double left = uniform[r] * sum(p, count), block;
        int64_t i = 0;
        for (; i + BLOCK < count && left >= (block = sum(p + i, BLOCK)); i += BLOCK) left -= block;
        for (; i < count - 1 && left >= p[i]; i++) left -= p[i];
        while (i && !(p[i] > 0)) i--; /* where rounding leads beyond the last */
        tokens[r] = i;
    }
    return 0;
}

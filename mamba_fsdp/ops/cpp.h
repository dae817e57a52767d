/* The common part of the C operators: the two number types, exp2 and log1p that compilers vectorise, loading and storing,
 * and flush-to-zero. It is compiled once per pair of types:
 *   REAL   the type of calculations: float or double
 *   IO     the type in which activations and their gradients are stored: float, double or bfloat16
 *
 * Activations are (batch, length, channels), channels contiguous; a `row` argument is the distance between positions in
 * elements, so that a slice of a wider tensor needs no copy. LANES channels are computed at a time: loops over lanes
 * have a constant count, so that the compiler vectorises them.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE__)
#include <immintrin.h>
#endif

#define LANES 16
#define FOR_LANES(i) _Pragma("omp simd") for (int i = 0; i < LANES; i++)

#if defined(REAL_DOUBLE)
typedef double real;
#define LOG2E 1.4426950408889634
static inline real fast_exp2(real x) { return exp2(x); }
static inline real fast_log1p(real x) { return log1p(x); }
#else
typedef float real;
#define LOG2E 1.44269504f

/* Returns 2^x for x <= 0, to 1e-7; 0 below 2^-127; NaN for NaN. It rounds by adding 1.5 * 2^23, computes the fraction with
 * a polynomial (a Chebyshev fit of (2^r - 1) / r on [-0.5, 0.5]), and puts the whole part into the exponent's bits.
 * The bound is a weak variable, so that the compiler does not know its value: with a known bound it would compile both
 * sides separately, to six instructions instead of one. */
__attribute__((weak)) float lowest_exponent = -127.f;

static inline real fast_exp2(real x)
{
    x = lowest_exponent > x ? lowest_exponent : x;
    float whole = (x + 12582912.f) - 12582912.f;
    float r = x - whole;
    float p = 1.5461447456e-04f;
    p = p * r + 1.3390867351e-03f;
    p = p * r + 9.6180566699e-03f;
    p = p * r + 5.5503571043e-02f;
    p = p * r + 2.4022650922e-01f;
    p = p * r + 6.9314718803e-01f;
    p = p * r + 1.f;
    union { int32_t bits; float value; } scale = { ((int32_t)whole + 127) << 23 };
    return p * scale.value;
}

/* Returns log(1 + x) for x in [0, 1], as 2 atanh(x / (2 + x)), which is accurate for the smallest x too. */
static inline real fast_log1p(real x)
{
    float s = x / (2.f + x), w = s * s;
    float p = 1.2204701518e-01f;
    p = p * w + 1.0697133764e-01f;
    p = p * w + 1.4310311696e-01f;
    p = p * w + 1.9999347406e-01f;
    p = p * w + 3.3333339627e-01f;
    p = p * w + 1.f;
    return 2.f * s * p;
}
#endif

static inline real sigmoid(real x)
{
    const real magnitude = x < 0 ? -x : x, e = fast_exp2(-(real)LOG2E * magnitude);
    return (x < 0 ? e : 1) / (1 + e);
}

static inline real softplus(real x)
{
    real magnitude = x < 0 ? -x : x;
    return (x < 0 ? 0 : x) + fast_log1p(fast_exp2(-(real)LOG2E * magnitude));
}

#if defined(IO_BFLOAT16)
typedef uint16_t io;
static inline real from_io(io x)
{
    union { uint32_t bits; float value; } wide = { (uint32_t)x << 16 };
    return wide.value;
}
static inline io to_io(real x)
{
    union { float value; uint32_t bits; } wide = { x };
    uint32_t rounded = (wide.bits + 0x7fff + ((wide.bits >> 16) & 1)) >> 16;
    return x != x ? 0x7fc0 : rounded;
}
#else
typedef real io;
static inline real from_io(io x) { return x; }
static inline io to_io(real x) { return x; }
#endif

/* Loads `lanes` channels into an array of LANES elements, and sets the other elements to 0. */
static inline void load_lanes(real *to, const io *from, int lanes)
{
    if (lanes == LANES) {
        FOR_LANES(i) to[i] = from_io(from[i]);
    } else {
        for (int i = 0; i < LANES; i++) to[i] = i < lanes ? from_io(from[i]) : 0;
    }
}

static inline void load_real_lanes(real *to, const real *from, int lanes)
{
    if (from && lanes == LANES) {
        FOR_LANES(i) to[i] = from[i];
    } else {
        for (int i = 0; i < LANES; i++) to[i] = from && i < lanes ? from[i] : 0;
    }
}

static inline void store_lanes(io *to, const real *from, int lanes)
{
    if (lanes == LANES) {
        FOR_LANES(i) to[i] = to_io(from[i]);
    } else {
        for (int i = 0; i < lanes; i++) to[i] = to_io(from[i]);
    }
}

/* Makes denormal numbers count as 0. Decayed states become denormal, and arithmetic with denormal numbers is up to a
 * hundred times slower. Returns the former mode, for restore_denormals. */
static inline unsigned flush_denormals(void)
{
#if defined(__SSE__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
#else
    return 0;
#endif
}

static inline void restore_denormals(unsigned before)
{
#if defined(__SSE__)
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

/* Tokens of steps, as in ../ulp_encoding.py. */
#ifndef WW_STEP_TOKENS_H
#define WW_STEP_TOKENS_H

#include "units.h"

static unsigned tokens_of_width(unsigned unit) { return unit == 1 ? 31 : unit == 2 ? 63 : unit == 4 ? 79 : 111; }

static inline unsigned token_of(uint64_t magnitude, unsigned *raw) {
    if (magnitude < 16) {
        *raw = 0;
        return (unsigned)magnitude - 1;
    }
    unsigned octave = bit_length(magnitude) - 1;
    *raw = octave < 16 ? octave - 2 : octave;
    return octave < 16 ? 15 + (octave - 4) * 4 + (unsigned)(magnitude >> (octave - 2) & 3) : 63 + octave - 16;
}

static inline uint64_t least_of(unsigned token, unsigned *raw) {
    if (token < 15) {
        *raw = 0;
        return token + 1;
    }
    unsigned octave = token < 63 ? (token - 15) / 4 + 4 : token - 63 + 16;
    *raw = token < 63 ? octave - 2 : octave;
    return (uint64_t)(token < 63 ? (token - 15) % 4 + 4 : 1) << *raw;
}

static inline uint64_t magnitude_of(uint64_t step) { return (int64_t)step < 0 ? 0 - step : step; }

#endif

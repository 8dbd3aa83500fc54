/* The sixteen lanes of the entropy coder, a vector at a time. The same bytes as the loops of rans.h. */
#ifndef WW_LANES_H
#define WW_LANES_H

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define LANES_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,popcnt")))

#define LANES_INLINE LANES_TARGET static inline __attribute__((always_inline))

/* The tables of sixteen symbols, times `stride`. `which` is NULL if there is one table. */
LANES_INLINE __m512i rows_of(const uint8_t *which, size_t at, int stride) {
    if (!which) return _mm512_setzero_si512();
    __m512i table = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(which + at)));
    return _mm512_mullo_epi32(table, _mm512_set1_epi32(stride));
}

/* Decodes groups of sixteen symbols while there are words for all lanes. Returns the number of symbols. */
LANES_INLINE size_t decode_groups(
    uint32_t *state, const uint8_t **words, const uint8_t *end, const uint32_t *entries, const uint8_t *which,
    uint8_t *out, size_t count) {
    const __m512i low = _mm512_set1_epi32(SCALE - 1), one = _mm512_set1_epi32(1);
    __m512i x = _mm512_loadu_si512(state);
    const uint8_t *next = *words;
    size_t i = 0;
    for (; i + 16 <= count && end - next >= 32; i += 16) {
        __m512i slot = _mm512_or_si512(_mm512_and_si512(x, low), rows_of(which, i, SCALE));
        __m512i entry = _mm512_i32gather_epi32(slot, entries, 4);
        __m512i share = _mm512_add_epi32(_mm512_and_si512(entry, low), one);
        x = _mm512_mullo_epi32(share, _mm512_srli_epi32(x, SCALE_BITS));
        x = _mm512_add_epi32(x, _mm512_and_si512(_mm512_srli_epi32(entry, 12), low));
        __mmask16 more = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(1 << 16));
        __m512i due = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)next));
        due = _mm512_maskz_expand_epi32(more, due);
        x = _mm512_mask_or_epi32(x, more, _mm512_slli_epi32(x, 16), due);
        next += 2 * (unsigned)__builtin_popcount(more);
        _mm_storeu_si128((__m128i *)(out + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(entry, 24)));
    }
    _mm512_storeu_si512(state, x);
    *words = next;
    return i;
}

LANES_TARGET static size_t decode_sixteen(
    uint32_t *state, const uint8_t **words, const uint8_t *end, const uint32_t *entries, const uint8_t *which,
    uint8_t *out, size_t count) {
    return which ? decode_groups(state, words, end, entries, which, out, count)
                 : decode_groups(state, words, end, entries, NULL, out, count);
}

/* Of one table, for each symbol: 1 / share, and share - 1 and start in 12 bits each. */
typedef struct {
    double inverse[SYMBOLS];
    uint32_t code[SYMBOLS];
} LaneCodes;

enum { CODE_STRIDE = sizeof(LaneCodes) / 4, INVERSE_STRIDE = sizeof(LaneCodes) / 8 };

/* Quotients of eight states: exact, because a state plus a half is never close to a multiple of a share. */
LANES_INLINE __m256i quotients(__m256i x, __m256i symbol, const LaneCodes *c) {
    __m512d inverse = _mm512_i32gather_pd(symbol, c->inverse, 8);
    __m512d value = _mm512_add_pd(_mm512_cvtepu32_pd(x), _mm512_set1_pd(0.5));
    return _mm512_cvttpd_epu32(_mm512_mul_pd(value, inverse));
}

/* Encodes `count` symbols, a multiple of sixteen, from the last. The words before `at` are filled downwards. */
LANES_INLINE size_t encode_groups(
    uint32_t *state, uint16_t *words, size_t at, const LaneCodes *codes, const uint8_t *symbols, const uint8_t *which,
    size_t count) {
    const __m512i low = _mm512_set1_epi32(SCALE - 1), one = _mm512_set1_epi32(1);
    __m512i x = _mm512_loadu_si512(state);
    for (size_t i = count; i > 0; i -= 16) {
        __m512i symbol = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(symbols + i - 16)));
        __m512i in_codes = _mm512_add_epi32(symbol, rows_of(which, i - 16, CODE_STRIDE));
        __m512i in_inverses = _mm512_add_epi32(symbol, rows_of(which, i - 16, INVERSE_STRIDE));
        __m512i code = _mm512_i32gather_epi32(in_codes, codes->code, 4);
        __m512i less = _mm512_and_si512(code, low), share = _mm512_add_epi32(less, one);
        /* x >= share * 2^20, without the overflow of a share of 4096. */
        __mmask16 due = _mm512_cmpgt_epu32_mask(_mm512_srli_epi32(x, 20), less);
        at -= (unsigned)__builtin_popcount(due);
        __m256i out = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(due, x));
        _mm256_mask_storeu_epi16(words + at, (__mmask16)((1u << __builtin_popcount(due)) - 1), out);
        x = _mm512_mask_srli_epi32(x, due, x, 16);
        __m256i first = quotients(_mm512_castsi512_si256(x), _mm512_castsi512_si256(in_inverses), codes);
        __m256i second =
            quotients(_mm512_extracti64x4_epi64(x, 1), _mm512_extracti64x4_epi64(in_inverses, 1), codes);
        __m512i quotient = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
        __m512i rest = _mm512_sub_epi32(x, _mm512_mullo_epi32(quotient, share));
        x = _mm512_add_epi32(_mm512_slli_epi32(quotient, SCALE_BITS), rest);
        x = _mm512_add_epi32(x, _mm512_srli_epi32(code, 12));
    }
    _mm512_storeu_si512(state, x);
    return at;
}

LANES_TARGET static size_t encode_sixteen(
    uint32_t *state, uint16_t *words, size_t at, const LaneCodes *codes, const uint8_t *symbols, const uint8_t *which,
    size_t count) {
    return which ? encode_groups(state, words, at, codes, symbols, which, count)
                 : encode_groups(state, words, at, codes, symbols, NULL, count);
}

#define HAS_LANES 1
#else
#define HAS_LANES 0
#endif

#endif

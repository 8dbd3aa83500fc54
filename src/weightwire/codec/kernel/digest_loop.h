/* Digests of many words. Part of hot_loops.h. */

/* Adds the pending words to the digest. */
INLINE void NAME(digest_rewritten)(Rewritten *words, Digest *digest) {
    uint64_t a = 0, b = 0;
    if (!words->count) return;
    for (size_t i = 0; i < words->count; i++) {
        a += digest_a(words->index[i], words->after[i]) - digest_a(words->index[i], words->before[i]);
        b += digest_b(words->index[i], words->after[i]) - digest_b(words->index[i], words->before[i]);
    }
    digest->sum[0] += a;
    digest->sum[1] += b;
    words->count = 0;
}

/* The digest of a run of words: two plain sums, which the compiler vectorizes. */
INLINE void NAME(digest_words)(
    const uint8_t *p, size_t count, uint64_t start, Digest *out, const unsigned word) {
    uint64_t a = 0, b = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = load(p + i * word, word);
        a += digest_a(start + i, bits);
        b += digest_b(start + i, bits);
    }
    out->sum[0] += a;
    out->sum[1] += b;
}

TARGET static void NAME(digest_all)(Rewritten *words, Digest *digest) { NAME(digest_rewritten)(words, digest); }

/* Adds the digest of a run of bytes that begins with word `start`. */
TARGET static void NAME(digest)(const uint8_t *p, size_t size, unsigned word, uint64_t start, Digest *out) {
    switch (word) {
        case 1: NAME(digest_words)(p, size, start, out, 1); break;
        case 2: NAME(digest_words)(p, size / 2, start, out, 2); break;
        case 4: NAME(digest_words)(p, size / 4, start, out, 4); break;
        default: NAME(digest_words)(p, size / 8, start, out, 8); break;
    }
}

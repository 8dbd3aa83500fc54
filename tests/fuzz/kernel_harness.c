/* A libFuzzer target for the kernel's decoder, without Python. tests/fuzz/engines.py builds it.
 *
 * The environment variable WEIGHTWIRE_FUZZ_KIND chooses the encoding. blocks.py describes the input and reads the same
 * corpus. Every block is decoded with all vector widths, written into a target and undone, and encoded again.
 */
#include <stdio.h>

#include "../../src/weightwire/codec/kernel/decoding.h"
#include "../../src/weightwire/codec/kernel/encodings.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most);

enum { HEAD = 5 };

typedef struct {
    Classing k;
    size_t count, line, size;
    uint8_t *old, *data; /* old: NULL without a base */
} Block;

typedef struct {
    const char *why;
    int started; /* the first step accepted it: only the second one uses vectors and writes */
    unsigned unit; /* units that are not floats are coded as bytes, apart from those of full blocks */
    size_t count, changes;
    uint32_t *position; /* NULL: all units */
    uint8_t *value;
    Digest digest;
} Decoded;

static const Classing LAYOUTS[] = {
    {1, 0, 0, 0, 0},   {2, 0, 0, 0, 0},  {4, 0, 0, 0, 0}, {8, 0, 0, 0, 0}, {8, 11, 52, 0, 0},
    {4, 8, 23, 0, 0},  {2, 5, 10, 0, 0}, {2, 8, 7, 0, 0}, {1, 4, 3, 0, 0}, {1, 5, 2, 0, 0},
};

static int kind = ULP, telling;
static Pieces pieces(const uint8_t *units, const Block *b) {
    return (Pieces){(uint8_t *)(uintptr_t)units, NULL, b->count * b->k.unit};
}

/* The block as a segment of units of this size. */
static Indexing indexing(const Block *b, unsigned unit) {
    return (Indexing){b->k.unit, 0, b->count * (b->k.unit / unit)};
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    const char *wanted = getenv("WEIGHTWIRE_FUZZ_KIND");
    (void)argc;
    (void)argv;
    telling = getenv("WEIGHTWIRE_FUZZ_TELL") != NULL; /* print the verdicts, to compare them with those in Python */
    if (wanted) kind = !strcmp(wanted, "full") ? FULL : !strcmp(wanted, "dense") ? DENSE : ULP;
    return 0;
}

static void demand(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "FAILURE: %s\n", what);
    abort();
}

/* Memory of exactly this size, so that ASan notices every access outside of it. */
static uint8_t *exactly(const void *from, size_t size) {
    uint8_t *copy = malloc(size);
    demand(copy != NULL, "out of memory");
    if (from && size) memcpy(copy, from, size);
    return copy;
}

/* The fields before the block: unit layout, number of units, line length, and a pattern that fills the base. */
static int parse(const uint8_t *input, size_t size, Block *b) {
    if (size < HEAD + 1) return 0;
    b->k = LAYOUTS[input[0] % 10];
    /* Mostly few units, which is fast. Loops work on chunks of 4096, so some blocks have two. */
    b->count = 1 + input[1] + 256 * (size_t)(input[2] & (input[2] < 0xE0 ? 1 : 31));
    b->line = input[3] ? 56 + 8 * (size_t)input[3] : 0;
    if (b->line > b->count) b->line = 0;
    if (b->line) b->count -= b->count % b->line;
    size_t pattern = input[4] < size - HEAD ? input[4] : size - HEAD;
    b->size = size - HEAD - pattern;
    if (!b->size) return 0;
    b->old = pattern ? exactly(NULL, b->count * b->k.unit) : NULL;
    for (size_t i = 0; b->old && i < b->count * b->k.unit; i++) b->old[i] = input[HEAD + i % pattern];
    b->data = exactly(input + HEAD + pattern, b->size);
    b->data[0] = (uint8_t)((b->data[0] & ~3) | kind);
    return 1;
}

static Decoded decode(const uint8_t *data, size_t size, const Block *b, const uint8_t *old, uint8_t *target) {
    Decoded found = {0};
    Classing k = is_full(data) ? b->k : coded_as(&b->k);
    size_t line = b->line * (b->k.unit / k.unit);
    Reading g;
    Landed landed = {0};
    Pieces base = pieces(old, b), into = pieces(target, b);
    memset(&g, 0, sizeof g);
    found.unit = k.unit;
    found.count = b->count * (b->k.unit / k.unit);
    found.why = decode_start(data, size, old ? &base : NULL, found.count, line, &k, &g, &found.changes);
    found.started = !found.why;
    if (!found.why) {
        demand(found.changes <= found.count, "more changes than units");
        landed.position = found.position = is_ulp(data) ? (uint32_t *)(void *)exactly(NULL, 4 * found.changes) : NULL;
        landed.value = found.value = exactly(NULL, found.changes * k.unit);
        landed.target = target ? &into : NULL;
        landed.where = indexing(b, k.unit);
        landed.digests = &found.digest;
        found.why = decode_finish(data, size, old ? &base : NULL, found.count, line, &k, &g, &landed);
    }
    reading_free(&g);
    return found;
}

static void forget(Decoded *d) {
    free(d->position);
    free(d->value);
}

static void demand_same(const Decoded *one, const Decoded *other) {
    demand(one->why == other->why || (one->why && other->why && !strcmp(one->why, other->why)), "widths: other verdict");
    if (one->why) return;
    demand(one->changes == other->changes, "widths: another number of changes");
    demand(!memcmp(one->value, other->value, one->changes * one->unit), "widths: other values");
    demand(!one->position || !memcmp(one->position, other->position, 4 * one->changes), "widths: other positions");
}

/* What was decoded and written survives being encoded and decoded again. */
static void encode_again(const Block *b, const uint8_t *before, const uint8_t *after) {
    Classing k = b->k;
    Bytes out = {0};
    Digest digest = {{0, 0}};
    uint32_t changed = 0;
    Pieces old = pieces(before, b), new = pieces(after, b);
    Indexing where = indexing(b, k.unit);
    demand(encode_block(&old, &new, b->count, b->line, &k, where, &out, &changed, &digest), "out of memory");
    if (out.size) {
        uint8_t *data = exactly(out.data, out.size), *copy = exactly(before, b->count * k.unit);
        Decoded found = decode(data, out.size, b, copy, copy);
        demand(!found.why && !memcmp(copy, after, b->count * k.unit), "an encoded block does not decode to the same");
        demand(found.digest.sum[0] == digest.sum[0] && found.digest.sum[1] == digest.sum[1], "another digest change");
        forget(&found);
        free(copy);
        free(data);
    }
    scratch_free(out.data);
}

/* Changed bytes, joined to units, are the changed units. */
static void check_joined(const Block *b, const Decoded *found, const uint8_t *before, const uint8_t *after) {
    unsigned unit = b->k.unit;
    size_t joined = count_joined(found->position, found->changes, unit);
    uint32_t *position = (uint32_t *)(void *)exactly(NULL, 4 * joined);
    uint8_t *value = exactly(NULL, joined * unit);
    Pieces old = pieces(before, b);
    join_bytes(&old, found->position, found->value, found->changes, unit, position, value);
    for (size_t i = 0; i < joined; i++) {
        demand(position[i] < b->count && (!i || position[i] > position[i - 1]), "positions of joined units");
        demand(!memcmp(after + (size_t)position[i] * unit, value + i * unit, unit), "other joined units");
    }
    free(position);
    free(value);
}

/* Writes the block into a target with the digest on the way, and undoes it. */
static void check_target(const Block *b, const Decoded *expected) {
    size_t bytes = b->count * b->k.unit;
    uint8_t *before = b->old ? exactly(b->old, bytes) : calloc(1, bytes), *target = exactly(before, bytes);
    Decoded found = decode(b->data, b->size, b, b->old ? target : NULL, target);
    demand(!found.why == !expected->why, "a patch has another verdict");
    if (found.why) {
        demand(!memcmp(target, before, bytes), "a rejected block has changed its target");
    } else {
        Digest was = {{0, 0}}, is = was, undone = was;
        unsigned unit = found.unit;
        Indexing whole = indexing(b, b->k.unit);
        Pieces old = pieces(before, b), new = pieces(target, b);
        digest_segments(&old, 1, whole, &was);
        digest_segments(&new, 1, whole, &is);
        demand(was.sum[0] + found.digest.sum[0] == is.sum[0] && was.sum[1] + found.digest.sum[1] == is.sum[1],
               "the digest was not brought up to date");
        for (size_t i = 0; i < expected->changes; i++) {
            size_t at = expected->position ? expected->position[i] : i;
            demand(at < found.count && (!i || !expected->position || at > expected->position[i - 1]), "positions");
            demand(!memcmp(target + at * unit, expected->value + i * unit, unit), "other units");
        }
        if (expected->position && unit < b->k.unit) check_joined(b, expected, before, target);
        encode_again(b, before, target);
        swap_block(&new, found.position, found.value, found.changes, unit, indexing(b, unit), &undone);
        demand(!memcmp(target, before, bytes), "a patch was not undone");
    }
    forget(&found);
    free(target);
    free(before);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    Block b = {0};
    if (!parse(input, size, &b)) {
        if (telling && size) puts("too short");
        return -1;
    }
    int widest = widest_vectors();
    vectors = widest;
    Decoded first = decode(b.data, b.size, &b, b.old, NULL);
    if (telling) puts(first.why ? first.why : "accepted");
    for (int width = 0; first.started && width < widest; width += 256) {
        vectors = width;
        Decoded other = decode(b.data, b.size, &b, b.old, NULL);
        demand_same(&first, &other);
        forget(&other);
    }
    vectors = widest;
    if (first.started) check_target(&b, &first);
    forget(&first);
    free(b.old);
    free(b.data);
    return 0;
}

/* --- mutations ---------------------------------------------------------------------------------------------------- */

static uint64_t chance(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

/* Changes some units: a few or many, by small steps or at random, everywhere or in some lines. */
static void change_units(const Block *b, uint8_t *new, uint64_t *state) {
    uint64_t rate = UINT64_C(1) << chance(state) % 11, lines = chance(state) % 3;
    int wild = chance(state) % 8 == 0;
    for (size_t i = 0; i < b->count; i++) {
        if (chance(state) % 1024 >= rate || (b->line && i / b->line % 3 < lines)) continue;
        uint64_t bits = load(new + i * b->k.unit, b->k.unit), step = chance(state);
        bits = wild ? step : bits + (step & 1 ? step >> 8 & 3 : 0 - (step >> 8 & 3));
        memcpy(new + i * b->k.unit, &bits, b->k.unit);
    }
}

/* Encodes new units in the encoding that is fuzzed. */
static void encode_as(const Block *b, const uint8_t *new, Bytes *out) {
    Classing k = kind == FULL ? b->k : coded_as(&b->k);
    ClassTable table;
    Digest digest = {{0, 0}};
    uint32_t changed = 0;
    int dense;
    size_t in_unit = b->k.unit / k.unit, count = b->count * in_unit, line = b->line * in_unit;
    Indexing where = indexing(b, k.unit);
    Pieces before = pieces(b->old, b), after = pieces(new, b);
    if (kind == FULL) {
        encode_full(&after, count, &k, SIZE_MAX, out);
        return;
    }
    demand(choose_classes(&before, &after, count, &k, &table, &dense), "out of memory");
    if (kind == DENSE)
        encode_dense(&before, &after, count, line, &k, where, out, &changed, &digest);
    else
        scan_and_encode_ulp(&before, &after, count, line, &k, where, out, &changed, &digest);
}

/* A valid block of this kind for the fields of an input. Random bytes seldom are one: the entropy coder must end well. */
static size_t write_valid(uint8_t *input, size_t size, size_t most, uint64_t *state) {
    Block b = {0};
    if (!parse(input, size, &b)) return 0;
    size_t bytes = b.count * b.k.unit, head = size - b.size, written = 0;
    uint8_t *new = b.old ? exactly(b.old, bytes) : calloc(1, bytes);
    Bytes out = {0};
    vectors = widest_vectors();
    change_units(&b, new, state);
    if (kind == FULL || (b.old && memcmp(b.old, new, bytes))) encode_as(&b, new, &out);
    if (out.size && head + out.size <= most) {
        memcpy(input + head, out.data, out.size);
        written = head + out.size;
    }
    scratch_free(out.data);
    free(new);
    free(b.old);
    free(b.data);
    return written;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    uint64_t state = seed;
    size_t written = chance(&state) % 8 == 0 ? write_valid(data, size, most, &state) : 0;
    if (written) return written;
    /* The head decides what everything after it means, so most mutations leave it alone. */
    size_t kept = size > HEAD ? HEAD + data[4] : size;
    if (kept >= size || chance(&state) % 8 == 0) return LLVMFuzzerMutate(data, size, most);
    return kept + LLVMFuzzerMutate(data + kept, size - kept, most - kept);
}

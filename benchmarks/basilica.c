/* Basilica v3's coding of bf16 changes, with one table lookup per weight. weightwire's kernel is timed against it.
 *
 * A straightforward scalar implementation of the published layout. Encoding counts the rank of every weight inside the
 * class of its old exponent. Decoding counts each class down to its next coded member. Everything else is
 * proportional to the number of changes. The caller applies zstd, which the format adds on top. It trusts its input,
 * so it must not be used to decode untrusted files.
 *
 * A tensor's index: u16 class count; per class u8 exponent, u8 complement flag, u32 ranks, u32 bytes and a
 * Rice block (u8 parameter, then the gaps between coded ranks). Its steps: (new - old) mod 2^16 of all
 * changes in the order of the weights, zigzagged to a byte each, 0xFF escaping to two more. Little endian.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { CLASSES = 256, CLASS_HEADER = 10, ESCAPE = 0xFF };

static inline unsigned exponent(uint16_t bits) { return (bits >> 7) & 0xFF; }

/* ---- bits, least significant first ---- */

typedef struct {
    uint8_t *out;
    uint64_t pending;
    unsigned count; /* of pending bits: below 8 after every put */
} bit_writer;

/* At most 56 bits per call. Writes up to 8 bytes past the end, so the caller's buffer must have room for them. */
static inline void put_bits(bit_writer *w, uint64_t bits, unsigned count)
{
    w->pending |= bits << w->count;
    w->count += count;
    memcpy(w->out, &w->pending, 8);
    w->out += w->count >> 3;
    w->pending >>= w->count & 56;
    w->count &= 7;
}

static inline void put_rice(bit_writer *w, uint32_t gap, unsigned parameter)
{
    uint32_t quotient = gap >> parameter;
    for (; quotient >= 24; quotient -= 24)
        put_bits(w, 0, 24);
    uint64_t remainder = gap & ((1u << parameter) - 1);
    put_bits(w, (remainder << 1 | 1) << quotient, quotient + 1 + parameter);
}

typedef struct {
    const uint8_t *in, *end;
    uint64_t pending;
    unsigned count;
} bit_reader;

/* Afterwards at least 56 bits are pending, or all that are left. Bits above `count` are the bits that follow. */
static inline void refill(bit_reader *r)
{
    if (r->end - r->in >= 8) {
        uint64_t next;
        memcpy(&next, r->in, 8);
        r->pending |= next << r->count;
        r->in += (63 - r->count) >> 3;
        r->count |= 56;
        return;
    }
    for (; r->count < 56 && r->in < r->end; r->count += 8)
        r->pending |= (uint64_t)*r->in++ << r->count;
}

static inline uint32_t get_rice(bit_reader *r, unsigned parameter)
{
    uint32_t quotient = 0;
    refill(r);
    while ((r->pending & ((1ull << r->count) - 1)) == 0) {
        quotient += r->count;
        r->pending = r->count = 0;
        refill(r);
    }
    unsigned zeros = (unsigned)__builtin_ctzll(r->pending);
    r->pending >>= zeros + 1;
    r->count -= zeros + 1;
    refill(r);
    uint32_t remainder = (uint32_t)(r->pending & ((1u << parameter) - 1));
    r->pending >>= parameter;
    r->count -= parameter;
    return (quotient + zeros) << parameter | remainder;
}

/* ---- encode ---- */

static uint64_t rice_cost(const uint32_t *gaps, uint32_t count, unsigned parameter)
{
    uint64_t bits = (uint64_t)count * (parameter + 1);
    for (uint32_t i = 0; i < count; i++)
        bits += gaps[i] >> parameter;
    return bits;
}

/* The cheapest of the three parameters around the mean's logarithm, which is optimal for near-geometric gaps. */
static unsigned rice_parameter(const uint32_t *gaps, uint32_t count, uint32_t members)
{
    unsigned middle = 31u - (unsigned)__builtin_clz(members / count | 1);
    unsigned best = middle;
    for (unsigned candidate = middle ? middle - 1 : 0; candidate <= middle + 1 && candidate < 31; candidate++)
        if (rice_cost(gaps, count, candidate) < rice_cost(gaps, count, best))
            best = candidate;
    return best;
}

/* Gaps between changed ranks, or between unchanged ranks if those are fewer. Returns their count. */
static uint32_t gaps_of_class(const uint32_t *ranks, uint32_t changed, uint32_t members, int complement,
                              uint32_t *gaps)
{
    uint32_t count = 0, next = 0;
    if (!complement) {
        for (; count < changed; next = ranks[count++] + 1)
            gaps[count] = ranks[count] - next;
        return count;
    }
    uint32_t after_last_unchanged = 0;
    for (uint32_t i = 0; i <= changed; i++) {
        uint32_t end = i < changed ? ranks[i] : members;
        for (; next < end; after_last_unchanged = ++next)
            gaps[count++] = next - after_last_unchanged;
        next = end + 1;
    }
    return count;
}

static uint8_t *write_class(uint8_t *out, unsigned class, const uint32_t *ranks, uint32_t changed,
                            uint32_t members, uint32_t *gaps)
{
    uint8_t complement = changed > members / 2;
    uint32_t count = gaps_of_class(ranks, changed, members, complement, gaps);
    bit_writer writer = {out + CLASS_HEADER + 1, 0, 0};
    unsigned parameter = count ? rice_parameter(gaps, count, members) : 0;
    for (uint32_t i = 0; i < count; i++)
        put_rice(&writer, gaps[i], parameter);
    if (writer.count)
        writer.out++; /* the last, partial byte is already there */
    uint32_t bytes = (uint32_t)(writer.out - out - CLASS_HEADER);
    out[0] = (uint8_t)class;
    out[1] = complement;
    memcpy(out + 2, &count, 4);
    memcpy(out + 6, &bytes, 4);
    out[CLASS_HEADER] = (uint8_t)parameter;
    return writer.out;
}

static inline uint8_t *write_step(uint8_t *out, uint16_t old, uint16_t new)
{
    int16_t step = (int16_t)(new - old);
    uint16_t zigzag = (uint16_t)((uint16_t)step << 1 ^ (uint16_t)(step >> 15));
    if (zigzag < ESCAPE) {
        *out = (uint8_t)zigzag;
        return out + 1;
    }
    *out = ESCAPE;
    memcpy(out + 1, &zigzag, 2);
    return out + 3;
}

typedef struct {
    uint32_t members[CLASSES], changed[CLASSES];
    uint32_t *position; /* of every change, in order */
    uint32_t *rank;     /* and its rank among the weights of its old exponent */
    uint32_t count;
} changes;

/* The counters and cursors are locals, so the compiler does not reload them after every store. */
static void find_changes(const uint16_t *restrict old, const uint16_t *restrict new, uint32_t weights,
                         changes *found)
{
    uint32_t members[CLASSES] = {0}, changed[CLASSES] = {0}, count = 0;
    uint32_t *restrict position = found->position, *restrict rank = found->rank;
    for (uint32_t i = 0; i < weights; i++) {
        unsigned class = exponent(old[i]);
        uint32_t r = members[class]++;
        if (old[i] != new[i]) {
            position[count] = i;
            rank[count++] = r;
            changed[class]++;
        }
    }
    memcpy(found->members, members, sizeof members);
    memcpy(found->changed, changed, sizeof changed);
    found->count = count;
}

static uint8_t *write_index(const uint16_t *old, const changes *found, uint32_t *by_class, uint32_t *gaps,
                            uint8_t *out)
{
    uint32_t start[CLASSES], fill[CLASSES], total = 0;
    uint16_t classes = 0;
    for (unsigned c = 0; c < CLASSES; total += found->changed[c++]) {
        start[c] = fill[c] = total;
        classes += found->changed[c] > 0;
    }
    for (uint32_t i = 0; i < found->count; i++)
        by_class[fill[exponent(old[found->position[i]])]++] = found->rank[i];
    memcpy(out, &classes, 2);
    out += 2;
    for (unsigned c = 0; c < CLASSES; c++)
        if (found->changed[c])
            out = write_class(out, c, by_class + start[c], found->changed[c], found->members[c], gaps);
    return out;
}

/* Writes the index, then the steps, to `out`, which must have room for 8192 bytes and 4 per weight. Stores the end of
 * each in `ends`. Returns 0, or -1 if out of memory. */
int basilica_encode(const uint16_t *old, const uint16_t *new, uint32_t weights, uint8_t *out, uint64_t ends[2])
{
    /* Room for every weight to change. Pages that are not written cost nothing. */
    uint32_t *scratch = malloc(4 * ((size_t)weights + 1) * sizeof *scratch);
    if (!scratch)
        return -1;
    changes found = {.position = scratch, .rank = scratch + weights};
    find_changes(old, new, weights, &found);
    uint8_t *end = write_index(old, &found, scratch + 2 * (size_t)weights, scratch + 3 * (size_t)weights, out);
    ends[0] = (uint64_t)(end - out);
    for (uint32_t i = 0; i < found.count; i++)
        end = write_step(end, old[found.position[i]], new[found.position[i]]);
    ends[1] = (uint64_t)(end - out);
    free(scratch);
    return 0;
}

/* ---- apply ---- */

/* For the pass over the weights: per class, the number of members until the next coded one, and the gaps after it. */
typedef struct {
    uint32_t countdown[CLASSES];
    uint8_t complement[CLASSES];
    const uint32_t *gap[CLASSES];
} class_table;

static const uint8_t *read_class(const uint8_t *in, class_table *table, uint32_t **gaps)
{
    uint32_t count, bytes;
    unsigned class = in[0], parameter = in[CLASS_HEADER];
    memcpy(&count, in + 2, 4);
    memcpy(&bytes, in + 6, 4);
    bit_reader reader = {in + CLASS_HEADER + 1, in + CLASS_HEADER + bytes, 0, 0};
    uint32_t *first = *gaps;
    for (uint32_t i = 0; i < count; i++)
        first[i] = get_rice(&reader, parameter);
    first[count] = UINT32_MAX; /* nothing coded after the last */
    table->complement[class] = in[1];
    table->countdown[class] = first[0];
    table->gap[class] = first + 1;
    *gaps += count + 1;
    return reader.end;
}

static inline const uint8_t *apply_step(const uint8_t *in, uint16_t *weight)
{
    uint16_t zigzag = *in++;
    if (zigzag == ESCAPE) {
        memcpy(&zigzag, in, 2);
        in += 2;
    }
    *weight += (uint16_t)(zigzag >> 1 ^ -(zigzag & 1));
    return in;
}

static void apply_changes(uint16_t *weights, uint32_t count, class_table *table, const uint8_t *steps)
{
    for (uint32_t i = 0; i < count; i++) {
        unsigned class = exponent(weights[i]);
        unsigned change = table->complement[class];
        if (table->countdown[class]-- == 0) {
            table->countdown[class] = *table->gap[class]++;
            change = !change;
        }
        if (change)
            steps = apply_step(steps, &weights[i]);
    }
}

/* Returns 0, or -1 if out of memory. */
int basilica_apply(uint16_t *weights, uint32_t count, const uint8_t *index, const uint8_t *steps)
{
    uint32_t *gaps = malloc(((size_t)count + CLASSES) * sizeof *gaps);
    if (!gaps)
        return -1;
    class_table table = {0};
    memset(table.countdown, 0xFF, sizeof table.countdown); /* a class that is not in the file is never reached */
    uint16_t classes;
    memcpy(&classes, index, 2);
    index += 2;
    uint32_t *next = gaps;
    while (classes--)
        index = read_class(index, &table, &next);
    apply_changes(weights, count, &table, steps);
    free(gaps);
    return 0;
}

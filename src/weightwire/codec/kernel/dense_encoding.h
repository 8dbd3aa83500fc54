/* The `dense` encoding, as in ../dense_encoding.py. */
#ifndef WW_DENSE_ENCODING_H
#define WW_DENSE_ENCODING_H

#include "class_heads.h"
#include "marks.h"
#include "step_tables.h"

/* --- writing --- */

/* A block before it is written. */
typedef struct {
    int by_lines;
    Marks lines;
    size_t units; /* of all lines, or of the listed ones */
    StepTables tables;
} DensePlan;

static uint32_t symbols_counted(const DenseScan *s, unsigned class, unsigned symbol) {
    uint32_t total = 0;
    for (unsigned i = 0; i < APART; i++) total += s->counts->of[i][class][symbol];
    return total;
}

/* Moves the lines that are listed together. */
static void keep_lines(DenseScan *s, size_t line) {
    for (size_t i = 0; i < s->lines; i++) {
        memmove(s->symbol + i * line, s->symbol + s->line[i] * line, line);
        memmove(s->class + i * line, s->class + s->line[i] * line, line);
    }
}

static int dense_plan(DensePlan *p, DenseScan *s, size_t count, size_t line) {
    uint32_t members[CLASSES], inside[CLASSES];
    size_t changed[CLASSES], lines = line ? count / line : 0;
    for (unsigned c = 0; c < CLASSES; c++) {
        StepTable *t = &p->tables.table[c];
        memset(t, 0, sizeof *t);
        t->counts[0] = symbols_counted(s, c, 0);
        for (unsigned symbol = 1; symbol < SYMBOLS; symbol++) {
            uint32_t here = symbols_counted(s, c, symbol);
            t->counts[1 + (symbol - 1) / 2] += here;
            t->positive += symbol & 1 ? here : 0;
            t->total += here;
        }
        changed[c] = t->total;
        inside[c] = (uint32_t)(t->counts[0] + t->total);
        members[c] = inside[c] + s->still[c];
        p->tables.present[c] = t->total > 0;
    }
    p->units = count;
    p->by_lines = lines && lines_pay(members, inside, changed, s->lines, lines);
    for (unsigned c = 0; !p->by_lines && c < CLASSES; c++) p->tables.table[c].counts[0] += s->still[c];
    share_tables(&p->tables);
    if (!p->by_lines) return 1;
    keep_lines(s, line);
    p->units = s->lines * line;
    uint32_t *listed = s->line;
    s->line = NULL;
    return marks_of(&p->lines, listed, s->lines, (uint32_t)lines);
}

static int dense_write(const DensePlan *p, const DenseScan *s, const Classing *k, Bytes *out) {
    Encoder e;
    BitWriter w = {0};
    Table *tables = scratch_new(CLASSES * sizeof *tables);
    int good = tables && encoder_start(&e, p->units + p->lines.symbols);
    if (!good) {
        scratch_free(tables);
        return 0;
    }
    for (unsigned c = 0; c < CLASSES; c++) {
        tables[c] = (Table){.symbols = 1, .share = {SCALE}}; /* without a change: costs nothing */
        if (p->tables.present[c]) step_shares(&p->tables.table[c].levels, p->tables.table[c].plus, 1, &tables[c]);
    }
    good = encode_mixed_section(&e, s->symbol, s->class, p->units, tables, CLASSES);
    if (p->by_lines) {
        gap_table(gap_which(p->lines.j), &tables[0]);
        encode_section(&e, p->lines.symbol, p->lines.symbols, &tables[0]);
    }
    encoder_finish(&e, (uint8_t)(DENSE | (p->by_lines ? LINES : 0)), out);
    write_classes(&w, k, p->tables.present);
    if (p->by_lines) write_marks(&w, &p->lines, 0);
    write_step_tables(&w, &p->tables);
    if (p->by_lines) write_marks_raw(&w, &p->lines);
    bits_append(&w, s->raw.data, 8 * s->raw.size + s->held_bits);
    bits_flush(&w);
    bytes_add(out, w.bytes.data, w.bytes.size);
    good = good && !w.bytes.failed && !out->failed;
    scratch_free(w.bytes.data);
    scratch_free(e.words);
    scratch_free(tables);
    return good;
}

/* Changed units and changes of the digest are added for each segment. Returns 0 if memory runs out. */
static int encode_dense(
    const Pieces *old, const Pieces *new, size_t count, size_t line, const Classing *k, Indexing where, Bytes *out,
    uint32_t *changed, Digest *digests) {
    DensePlan p;
    DenseScan s;
    memset(&p, 0, sizeof p);
    memset(&s, 0, sizeof s);
    s.changed = changed;
    s.digests = digests;
    int good = dense_new(&s, count, line ? count / line : 0);
    good = good && HOT(dense_scan, old, new, count, line, k, where, &s);
    good = good && dense_plan(&p, &s, count, line) && dense_write(&p, &s, k, out);
    marks_free(&p.lines);
    dense_free(&s);
    return good;
}

/* --- reading --- */

/* What a block needs before and while it is read. */
typedef struct {
    ClassTable classes;
    Table tables[CLASSES]; /* of the present classes */
    uint8_t present[CLASSES];
    unsigned used;
    int by_lines;
    Gaps lines;
    uint32_t *listed; /* lines to change */
    size_t active;    /* how many */
    uint8_t *symbol, *class;
    DecodeTable *slots; /* of all classes */
    SymbolSteps steps;
} DenseReading;

static void dense_reading_free(DenseReading *g) {
    scratch_free(g->lines.distance);
    scratch_free(g->listed);
    scratch_free(g->symbol);
    scratch_free(g->class);
    scratch_free(g->slots);
}

static const char *read_dense_heads(DenseReading *g, Decoder *d, BitReader *r, size_t lines, Classing *k) {
    const char *why = read_classes(r, k, &g->classes, g->present, &g->used);
    if (why) return why;
    if (g->by_lines && !lines) return "it lists lines where there are none";
    if (g->by_lines && (why = read_marks(r, lines, 0, &g->lines))) return why;
    if ((why = read_step_tables(r, g->used, k, 1, g->tables))) return why;
    if (!g->by_lines) return NULL;
    uint8_t *symbols = scratch_new(g->lines.symbols + 1);
    g->listed = scratch_new((lines + 1) * sizeof *g->listed);
    why = symbols && g->listed ? read_gaps(d, r, lines, g->slots, symbols, &g->lines) : OUT_OF_MEMORY;
    scratch_free(symbols);
    if (!why) g->active = list_lines(&g->lines, lines, g->listed);
    return why;
}

/* The decoding tables of all classes with members. The units of a class without a change have symbol 0. */
static void use_tables(DenseReading *g, size_t units) {
    const Table unchanged = {.symbols = 1, .share = {SCALE}}, *table[CLASSES];
    uint8_t has_members[CLASSES] = {0};
    for (unsigned c = 0; c < CLASSES; c++) table[c] = &unchanged;
    for (unsigned i = 0; i < g->used; i++) table[g->present[i]] = &g->tables[i];
    for (size_t i = 0; i < units; i++) has_members[g->class[i]] = 1;
    for (unsigned c = 0; c < CLASSES; c++)
        if (has_members[c]) decode_table(table[c], &g->slots[c]);
}

static const char *read_dense_units(
    DenseReading *g, Decoder *d, BitReader *r, const Pieces *old, size_t count, size_t line, const Classing *k,
    uint8_t *value) {
    size_t segment = old->size / k->unit, length = g->by_lines ? line : segment;
    size_t runs = g->by_lines ? g->active : count / segment;
    g->symbol = scratch_new(runs * length + 1);
    g->class = scratch_new(runs * length + 1);
    if (!g->symbol || !g->class) return OUT_OF_MEMORY;
#define START_OF(i) ((g->by_lines ? g->listed[i] : (i)) * length)
#define OLD_AT(start) (piece_of(old, (start) / segment) + (start) % segment * k->unit)
    for (size_t i = 0; i < runs; i++)
        HOT(classify_units, OLD_AT(START_OF(i)), length, k, g->class + i * length);
    use_tables(g, runs * length);
    if (!decode_mixed_section(d, g->slots, g->class, g->symbol, runs * length))
        return "its entropy-coded part is too short";
    if (!decoder_ends_well(d)) return "its entropy-coded part does not end where it should";
    symbol_steps(k, &g->steps);
    for (size_t at = 0; g->by_lines && at < count; at += segment)
        memcpy(value + at * k->unit, piece_of(old, at / segment), old->size);
    for (size_t i = 0; i < runs; i++) {
        size_t start = START_OF(i);
        HOT(dense_apply, OLD_AT(start), g->symbol + i * length, length, k, &g->steps, r, value + start * k->unit);
    }
#undef START_OF
#undef OLD_AT
    return bits_end_well(r, 0) ? NULL : "its bit stream is too long or too short";
}

/* Returns NULL on success; `value` then holds `count` units. */
static const char *decode_dense(
    const uint8_t *data, size_t size, const Pieces *old, size_t count, size_t line, Classing *k, uint8_t *value) {
    const char *why;
    Decoder d;
    const uint8_t *rest = decoder_start(&d, data, size, &why);
    if (!rest) return why;
    BitReader r = {rest, 0, (uint64_t)(data + size - rest) * 8, 0};
    DenseReading *g = scratch_new(sizeof *g);
    if (!g) return OUT_OF_MEMORY;
    memset(g, 0, sizeof *g);
    g->by_lines = (data[0] & LINES) != 0;
    g->slots = scratch_new(CLASSES * sizeof *g->slots);
    why = g->slots ? read_dense_heads(g, &d, &r, line ? count / line : 0, k) : OUT_OF_MEMORY;
    if (!why) why = read_dense_units(g, &d, &r, old, count, line, k, value);
    dense_reading_free(g);
    scratch_free(g);
    return why;
}

#endif

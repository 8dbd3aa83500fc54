/* The kernel: the functions of numpy_kernel.py, at memory speed. Releases the interpreter while it works. A block is one
 * buffer, or a tuple with a buffer for each segment.
 *
 * A malformed block raises ValueError with the reason.
 */
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernel is for little-endian machines; the NumPy implementation serves elsewhere"
#endif

#include "kernel/borrowed_block.h"
#include "kernel/decoding.h"
#include "kernel/encodings.h"

static PyObject *new_digests(size_t segments, Digest **digests) {
    Py_ssize_t size = (Py_ssize_t)(segments * sizeof(Digest));
    PyObject *result = PyBytes_FromStringAndSize(NULL, size);
    if (!result) return NULL;
    *digests = (Digest *)(void *)PyBytes_AsString(result);
    memset(*digests, 0, (size_t)size);
    return result;
}

static PyObject *encode(
    const Block *old, const Block *new, Py_ssize_t count, Py_ssize_t line, Classing *k, Indexing where) {
    Digest *digests;
    Py_ssize_t size = count / (Py_ssize_t)where.segment * 4;
    PyObject *gained = new_digests((size_t)count / where.segment, &digests), *changed = PyBytes_FromStringAndSize(NULL, size);
    PyObject *result = NULL;
    if (gained && changed) {
        Bytes out = {0};
        int good;
        uint32_t *counts = memset(PyBytes_AsString(changed), 0, (size_t)size);
        const Pieces *base = old->lent ? &old->pieces : NULL;
        Py_BEGIN_ALLOW_THREADS;
        good = encode_block(base, &new->pieces, (size_t)count, (size_t)line, k, where, &out, counts, digests);
        Py_END_ALLOW_THREADS;
        if (!good)
            PyErr_NoMemory();
        else
            /* Not "y#": a kernel built with the headers of 3.13 would raise SystemError in 3.11 and 3.12. */
            result = Py_BuildValue(
                "NOO", PyBytes_FromStringAndSize((char *)out.data, (Py_ssize_t)out.size), changed, gained);
        scratch_free(out.data);
    }
    Py_XDECREF(gained);
    Py_XDECREF(changed);
    return result;
}

static PyObject *py_encode_block(PyObject *self, PyObject *args) {
    PyObject *old_object, *new_object, *result = NULL;
    Block old = {0}, new = {0};
    Classing k = {0};
    Indexing where;
    Py_ssize_t line, segment;
    unsigned long long start;
    (void)self;
    if (!PyArg_ParseTuple(
            args, "OOIIInnIK", &old_object, &new_object, &k.unit, &k.exponent, &k.mantissa, &line, &segment,
            &where.word, &start))
        return NULL;
    where.start = start;
    where.segment = (size_t)segment;
    if (!known_segment(&k, &where) || !borrow(new_object, segment * (Py_ssize_t)k.unit, 0, &new)) goto done;
    if (!known_layout(&k, &where, new.size)) goto done;
    Py_ssize_t count = new.size / (Py_ssize_t)k.unit;
    if (count < 1 || count > MOST || line < 0 || (line && segment % line)) {
        PyErr_SetString(PyExc_TypeError, "invalid block or line size");
        goto done;
    }
    if (old_object != Py_None && (!borrow(old_object, segment * (Py_ssize_t)k.unit, 0, &old) ||
                                  !fits(old.size, count, k.unit, "old")))
        goto done;
    result = encode(&old, &new, count, line, &k, where);
done:
    give_back(&old);
    give_back(&new);
    return result;
}

/* The changes of a block, as Python gets them. */
typedef struct {
    PyObject *positions, *values, *gained;
} Changes;

/* Allocates the results as soon as their size is known, so large results are not copied. */
static int changes_new(Changes *c, size_t changes, unsigned unit, int listed) {
    c->positions = listed ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(changes * 4)) : Py_NewRef(Py_None);
    c->values = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(changes * unit));
    return c->positions && c->values;
}

static void changes_free(Changes *c) {
    Py_XDECREF(c->positions);
    Py_XDECREF(c->values);
    Py_XDECREF(c->gained);
}

static void land_in(const Changes *c, int listed, Landed *landed) {
    landed->position = listed ? (uint32_t *)PyBytes_AsString(c->positions) : NULL;
    landed->value = (uint8_t *)PyByteArray_AsString(c->values);
}

/* The same changes of whole units. Without memory returns 0. */
static int join_changes(const Changes *c, const Pieces *units, size_t changes, unsigned unit, Changes *joined) {
    const uint32_t *position = (const uint32_t *)PyBytes_AsString(c->positions);
    const uint8_t *value = (const uint8_t *)PyByteArray_AsString(c->values);
    if (!changes_new(joined, count_joined(position, changes, unit), unit, 1)) return 0;
    uint32_t *to = (uint32_t *)PyBytes_AsString(joined->positions);
    uint8_t *out = (uint8_t *)PyByteArray_AsString(joined->values);
    Py_BEGIN_ALLOW_THREADS;
    join_bytes(units, position, value, changes, unit, to, out);
    Py_END_ALLOW_THREADS;
    return 1;
}

/* Undoes a change in place. */
static void undo(Landed *landed, size_t changes, unsigned unit) {
    if (landed->position)
        put_back(landed, unit);
    else
        swap_block(landed->target, NULL, landed->value, changes, unit, landed->where, landed->digests);
}

/* Decodes a block against its base, or into it if there is a target. */
static PyObject *decode_block(
    const Py_buffer *data, const Pieces *old, size_t count, size_t line, const Classing *given, Landed *landed) {
    const uint8_t *bytes = data->buf;
    size_t size = (size_t)data->len, changes = 0, units = count;
    Classing k = is_full(bytes) ? *given : coded_as(given);
    unsigned in_unit = given->unit / k.unit;
    Changes c = {NULL, NULL, NULL}, joined = c, *told = &c; /* `c` is needed to undo the change */
    PyObject *result = NULL;
    const char *why;
    Reading g;
    memset(&g, 0, sizeof g);
    count *= in_unit;
    line *= in_unit;
    landed->where.segment *= in_unit;
    Py_BEGIN_ALLOW_THREADS;
    why = decode_start(bytes, size, old, count, line, &k, &g, &changes);
    Py_END_ALLOW_THREADS;
    int listed = is_ulp(bytes), done = 0;
    if (!why) {
        size_t gains = landed->target ? units * given->unit / landed->target->size : 0;
        c.gained = new_digests(gains, &landed->digests);
        if (!c.gained || !changes_new(&c, changes, k.unit, listed)) why = OUT_OF_MEMORY;
    }
    if (!why) {
        land_in(&c, listed, landed);
        Py_BEGIN_ALLOW_THREADS;
        why = decode_finish(bytes, size, old, count, line, &k, &g, landed);
        Py_END_ALLOW_THREADS;
        done = !why && landed->target;
    }
    reading_free(&g);
    if (!why && listed && in_unit > 1) {
        told = &joined;
        if (!join_changes(&c, old, changes, given->unit, &joined)) why = OUT_OF_MEMORY;
    }
    if (why == OUT_OF_MEMORY)
        PyErr_NoMemory();
    else if (why)
        PyErr_SetString(PyExc_ValueError, why);
    else if (landed->target)
        result = Py_BuildValue("OOO", told->positions, told->values, c.gained);
    else
        result = Py_BuildValue("OO", told->positions, told->values);
    if (!result && done) undo(landed, changes, k.unit);
    changes_free(&joined);
    changes_free(&c);
    return result;
}

static int known_block(const Classing *k, Py_ssize_t count, Py_ssize_t line, Py_ssize_t size) {
    if (!known_units(k, 0)) return 0;
    if (count >= 1 && count <= MOST && line >= 0 && !(line && count % line) && size >= 1) return 1;
    PyErr_SetString(PyExc_TypeError, "invalid block or line size");
    return 0;
}

static PyObject *py_decode_block(PyObject *self, PyObject *args) {
    PyObject *old_object, *result = NULL;
    Py_buffer data = {0};
    Block old = {0};
    Classing k = {0};
    Py_ssize_t count, line;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*OnIIIn", &data, &old_object, &count, &k.unit, &k.exponent, &k.mantissa, &line))
        return NULL;
    if (!known_block(&k, count, line, data.len)) goto done;
    Py_ssize_t pieces = PyTuple_Check(old_object) ? PyTuple_Size(old_object) : 1;
    Py_ssize_t segment = pieces ? count / pieces : count;
    if (old_object != Py_None && (!borrow(old_object, segment * (Py_ssize_t)k.unit, 0, &old) ||
                                  !fits(old.size, count, k.unit, "old")))
        goto done;
    if (line && segment % line) {
        PyErr_SetString(PyExc_TypeError, "invalid block or line size");
        goto done;
    }
    Landed landed = {0};
    landed.where = (Indexing){k.unit, 0, (size_t)segment};
    result = decode_block(&data, old.lent ? &old.pieces : NULL, (size_t)count, (size_t)line, &k, &landed);
done:
    give_back(&old);
    PyBuffer_Release(&data);
    return result;
}

static PyObject *py_patch_block(PyObject *self, PyObject *args) {
    PyObject *target_object, *result = NULL;
    Py_buffer data = {0};
    Block target = {0};
    Classing k = {0};
    int fresh;
    Landed landed = {0};
    Py_ssize_t line, segment;
    unsigned long long start;
    (void)self;
    if (!PyArg_ParseTuple(
            args, "y*OpIIInnIK", &data, &target_object, &fresh, &k.unit, &k.exponent, &k.mantissa, &line, &segment,
            &landed.where.word, &start))
        return NULL;
    landed.where.start = start;
    landed.where.segment = (size_t)segment;
    if (!known_segment(&k, &landed.where) || !borrow(target_object, segment * (Py_ssize_t)k.unit, 1, &target)) goto done;
    Py_ssize_t count = target.size / (Py_ssize_t)k.unit;
    if (!known_block(&k, count, line, data.len) || !known_layout(&k, &landed.where, target.size)) goto done;
    if (line && segment % line) {
        PyErr_SetString(PyExc_TypeError, "invalid block or line size");
        goto done;
    }
    landed.target = &target.pieces;
    result = decode_block(&data, fresh ? NULL : &target.pieces, (size_t)count, (size_t)line, &k, &landed);
done:
    give_back(&target);
    PyBuffer_Release(&data);
    return result;
}

/* Checks that a patch fits a block of `count` units and, on request, that its positions ascend. */
static int known_patch(
    PyObject *given, Py_buffer *positions, const Py_buffer *values, Py_ssize_t count, unsigned unit, int ascending) {
    if (given == Py_None) return fits(values->len, count, unit, "values");
    size_t changes = (size_t)values->len / unit, good = 0;
    if (PyObject_GetBuffer(given, positions, PyBUF_SIMPLE) < 0) return 0;
    if (!fits(values->len, (Py_ssize_t)changes, unit, "values") || !fits(positions->len, (Py_ssize_t)changes, 4, "positions"))
        return 0;
    const uint32_t *at = positions->buf;
    Py_BEGIN_ALLOW_THREADS;
    while (good < changes && at[good] < (size_t)count && !(ascending && good && at[good] <= at[good - 1])) good++;
    Py_END_ALLOW_THREADS;
    if (good == changes) return 1;
    PyErr_SetString(
        PyExc_TypeError,
        at[good] < (size_t)count ? "positions do not ascend" : "a position lies outside its block");
    return 0;
}

/* Exchanges the units of a patch and its block. Without `write`, only computes the change of the digest. */
static PyObject *swap_or_tell(PyObject *args, int write) {
    PyObject *block_object, *positions_object, *result = NULL;
    Py_buffer positions = {0}, values = {0};
    Block block = {0};
    Classing k = {0};
    Indexing where;
    Digest *digests;
    Py_ssize_t segment;
    unsigned long long start;
    if (!PyArg_ParseTuple(
            args, write ? "OOw*InIK" : "OOy*InIK", &block_object, &positions_object, &values, &k.unit, &segment,
            &where.word, &start))
        return NULL;
    where.start = start;
    where.segment = (size_t)segment;
    if (!known_segment(&k, &where) || !borrow(block_object, segment * (Py_ssize_t)k.unit, write, &block)) goto done;
    if (!known_layout(&k, &where, block.size)) goto done;
    Py_ssize_t count = block.size / (Py_ssize_t)k.unit;
    if (!known_patch(positions_object, &positions, &values, count, k.unit, !write)) goto done;
    result = new_digests((size_t)(count / segment), &digests);
    if (!result) goto done;
    size_t changes = (size_t)values.len / k.unit;
    Py_BEGIN_ALLOW_THREADS;
    if (write)
        swap_block(&block.pieces, positions.buf, values.buf, changes, k.unit, where, digests);
    else
        digest_change(&block.pieces, positions.buf, values.buf, changes, k.unit, where, digests);
    Py_END_ALLOW_THREADS;
done:
    if (positions.obj) PyBuffer_Release(&positions);
    give_back(&block);
    PyBuffer_Release(&values);
    return result;
}

static PyObject *py_swap_block(PyObject *self, PyObject *args) {
    (void)self;
    return swap_or_tell(args, 1);
}

static PyObject *py_digest_change(PyObject *self, PyObject *args) {
    (void)self;
    return swap_or_tell(args, 0);
}

/* Copies the source to the target. Everything that can fail happens while the change can be undone. */
static PyObject *replace_block(const Pieces *target, const Pieces *source, size_t count, unsigned unit) {
    Replaced replaced = {0};
    size_t most = replaced_most(count, unit);
    PyObject *positions = NULL, *values = NULL, *result = NULL;
    int good;
    Py_BEGIN_ALLOW_THREADS;
    good = HOT(replace, target, source, count, most, unit, &replaced);
    Py_END_ALLOW_THREADS;
    int listed = replaced.count <= most;
    size_t size = (listed ? replaced.count : count) * unit;
    if (good) {
        positions = listed ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * replaced.count)) : Py_NewRef(Py_None);
        values = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)size);
        if (positions && values) result = Py_BuildValue("OO", positions, values);
    } else {
        PyErr_NoMemory();
    }
    uint8_t *position = result && listed ? (uint8_t *)PyBytes_AsString(positions) : NULL;
    uint8_t *value = result ? (uint8_t *)PyByteArray_AsString(values) : NULL;
    Py_BEGIN_ALLOW_THREADS;
    if (!result) {
        put_back_replaced(&replaced, target, unit);
    } else if (!listed) {
        replace_rest(&replaced, target, source, count, unit, value);
    } else if (replaced.count) {
        memcpy(position, replaced.position, 4 * replaced.count);
        memcpy(value, replaced.value, size);
    }
    Py_END_ALLOW_THREADS;
    replaced_free(&replaced);
    Py_XDECREF(positions);
    Py_XDECREF(values);
    return result;
}

static int overlap(const Pieces *a, const Pieces *b, size_t segments) {
    for (size_t i = 0; i < segments; i++) {
        uintptr_t x = (uintptr_t)piece_of(a, i), y = (uintptr_t)piece_of(b, i);
        if (x < y + b->size && y < x + a->size) return 1;
    }
    return 0;
}

static PyObject *py_replace_block(PyObject *self, PyObject *args) {
    PyObject *target_object, *source_object, *result = NULL;
    Block target = {0}, source = {0};
    Classing k = {0};
    Indexing where = {0};
    Py_ssize_t segment;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOIn", &target_object, &source_object, &k.unit, &segment)) return NULL;
    where.segment = (size_t)segment;
    where.word = k.unit;
    if (!known_segment(&k, &where) || !borrow(target_object, segment * (Py_ssize_t)k.unit, 1, &target)) goto done;
    if (!known_layout(&k, &where, target.size)) goto done;
    Py_ssize_t count = target.size / (Py_ssize_t)k.unit;
    if (!borrow(source_object, segment * (Py_ssize_t)k.unit, 0, &source)) goto done;
    if (!fits(source.size, count, k.unit, "source")) goto done;
    if (count > MOST)
        PyErr_SetString(PyExc_TypeError, "invalid block size");
    else if (overlap(&target.pieces, &source.pieces, (size_t)(count / segment)))
        PyErr_SetString(PyExc_TypeError, "target and source overlap");
    else
        result = replace_block(&target.pieces, &source.pieces, (size_t)count, k.unit);
done:
    give_back(&target);
    give_back(&source);
    return result;
}

static PyObject *py_digest(PyObject *self, PyObject *args) {
    PyObject *data_object, *result = NULL;
    Block data = {0};
    Classing k = {0};
    Indexing where;
    Digest *digests;
    Py_ssize_t segment;
    unsigned long long start;
    (void)self;
    if (!PyArg_ParseTuple(args, "OInIK", &data_object, &k.unit, &segment, &where.word, &start)) return NULL;
    where.start = start;
    where.segment = (size_t)segment;
    if (!known_segment(&k, &where) || !borrow(data_object, segment * (Py_ssize_t)k.unit, 0, &data)) goto done;
    if (!known_layout(&k, &where, data.size)) goto done;
    result = new_digests((size_t)(data.size / (segment * (Py_ssize_t)k.unit)), &digests);
    if (result) {
        size_t segments = (size_t)data.size / data.pieces.size;
        Py_BEGIN_ALLOW_THREADS;
        digest_segments(&data.pieces, segments, where, digests);
        Py_END_ALLOW_THREADS;
    }
done:
    give_back(&data);
    return result;
}

static PyObject *py_vectors(PyObject *self, PyObject *args) {
    int most;
    (void)self;
    if (!PyArg_ParseTuple(args, "i", &most)) return NULL;
    int widest = widest_vectors();
    vectors = most >= 512 && widest >= 512 ? 512 : most >= 256 && widest >= 256 ? 256 : 0;
    return PyLong_FromLong(vectors);
}

static PyObject *py_trim(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    Py_BEGIN_ALLOW_THREADS;
    scratch_trim();
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"encode_block", py_encode_block, METH_VARARGS,
     "encode_block(old|None, new, unit, exponent, mantissa, line, segment, word, start) -> bytes, changed, digest changes"},
    {"decode_block", py_decode_block, METH_VARARGS,
     "decode_block(data, old|None, count, unit, exponent, mantissa, line) -> positions|None, values"},
    {"patch_block", py_patch_block, METH_VARARGS,
     "patch_block(data, target, fresh, unit, exponent, mantissa, line, segment, word, start) -> positions|None, "
     "old values, digest changes"},
    {"swap_block", py_swap_block, METH_VARARGS,
     "swap_block(target, positions|None, values, unit, segment, word, start) -> digest changes; values become the old "
     "ones"},
    {"replace_block", py_replace_block, METH_VARARGS,
     "replace_block(target, source, unit, segment) -> positions|None, old values; the target becomes the source"},
    {"digest_change", py_digest_change, METH_VARARGS,
     "digest_change(old, positions|None, values, unit, segment, word, start) -> digest changes; what a swap would do, "
     "unwritten"},
    {"digest", py_digest, METH_VARARGS, "digest(data, unit, segment, word, start) -> digests"},
    {"vectors", py_vectors, METH_VARARGS, "vectors(most) -> how wide the vectors in use are from now on: 512, 256 or 0 bits"},
    {"trim", py_trim, METH_NOARGS, "trim(): frees the scratch memory that is kept for the next block"},
    {NULL, NULL, 0, NULL}};

static int kernel_exec(PyObject *module) {
    (void)module;
    vectors = widest_vectors();
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, kernel_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernel", "Blocks of weights at memory speed.", 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }

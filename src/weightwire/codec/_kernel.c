/* The kernel: the functions of numpy_kernel.py, at memory speed. Releases the interpreter while it works.
 *
 * A malformed block raises ValueError with the reason.
 */
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernel is for little-endian machines; the NumPy implementation serves elsewhere"
#endif

#include "kernel/decoding.h"
#include "kernel/encodings.h"

enum { MOST = 1 << 22 }; /* units in a block: ranks and distances must fit into 32 bits with room to spare */

static int fits(const Py_buffer *b, Py_ssize_t count, unsigned unit, const char *what) {
    if (b->len == count * (Py_ssize_t)unit) return 1;
    PyErr_Format(PyExc_TypeError, "%s has %zd bytes, not %zd", what, b->len, count * (Py_ssize_t)unit);
    return 0;
}

static int known_layout(const Classing *k, unsigned word, Py_ssize_t bytes) {
    unsigned unit = k->unit, bits = k->exponent + k->mantissa + 1;
    int good = (unit == 1 || unit == 2 || unit == 4 || unit == 8) && (!k->exponent || bits == 8 * unit);
    good = good && k->exponent <= 11 && (word == unit || word == 8) && bytes % (Py_ssize_t)word == 0;
    if (!good) PyErr_SetString(PyExc_TypeError, "invalid unit layout");
    return good;
}

static PyObject *py_encode_block(PyObject *self, PyObject *args) {
    PyObject *old_object, *result = NULL;
    Py_buffer old = {0}, new = {0};
    Classing k = {0};
    Indexing where;
    Py_ssize_t line;
    unsigned long long start;
    (void)self;
    if (!PyArg_ParseTuple(
            args, "Oy*IIInIK", &old_object, &new, &k.unit, &k.exponent, &k.mantissa, &line, &where.word, &start))
        return NULL;
    where.start = start;
    if (!known_layout(&k, where.word, new.len)) goto done;
    Py_ssize_t count = new.len / (Py_ssize_t)k.unit;
    if (count * (Py_ssize_t)k.unit != new.len || count < 1 || count > MOST || line < 0 ||
        (line && count % line)) {
        PyErr_SetString(PyExc_TypeError, "invalid block or line size");
        goto done;
    }
    if (old_object != Py_None &&
        (PyObject_GetBuffer(old_object, &old, PyBUF_SIMPLE) < 0 || !fits(&old, count, k.unit, "old")))
        goto done;
    Bytes out = {0};
    Digest digest = {{0, 0}};
    size_t changed;
    int good;
    Py_BEGIN_ALLOW_THREADS;
    good = encode_block(old.buf, new.buf, (size_t)count, (size_t)line, &k, where, &out, &changed, &digest);
    Py_END_ALLOW_THREADS;
    if (!good)
        PyErr_NoMemory();
    else
        /* Not "y#": a kernel built with the headers of 3.13 would raise SystemError in 3.11 and 3.12. */
        result = Py_BuildValue(
            "NnKK", PyBytes_FromStringAndSize((char *)out.data, (Py_ssize_t)out.size), (Py_ssize_t)changed,
            (unsigned long long)digest.sum[0], (unsigned long long)digest.sum[1]);
    scratch_free(out.data);
done:
    if (old.obj) PyBuffer_Release(&old);
    PyBuffer_Release(&new);
    return result;
}

/* Decodes a block against its base, or into it if there is a target. Python allocates the results as soon as their size
 * is known, so large results are not copied. */
static PyObject *decode_block(
    const Py_buffer *data, const uint8_t *old, size_t count, size_t line, Classing *k, Landed *landed) {
    const uint8_t *bytes = data->buf;
    size_t size = (size_t)data->len, changes = count;
    PyObject *positions = NULL, *values = NULL, *result = NULL;
    const char *why;
    Reading g;
    memset(&g, 0, sizeof g);
    Py_BEGIN_ALLOW_THREADS;
    why = decode_start(bytes, size, old, count, line, k, &g, &changes);
    Py_END_ALLOW_THREADS;
    int listed = is_ulp(bytes);
    if (!why) {
        positions = listed ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(changes * 4)) : Py_NewRef(Py_None);
        values = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(changes * k->unit));
        if (!positions || !values) why = OUT_OF_MEMORY;
    }
    if (!why) {
        landed->position = listed ? (uint32_t *)PyBytes_AsString(positions) : NULL;
        landed->value = (uint8_t *)PyByteArray_AsString(values);
        Py_BEGIN_ALLOW_THREADS;
        why = decode_finish(bytes, size, old, count, line, k, &g, landed);
        Py_END_ALLOW_THREADS;
    }
    reading_free(&g);
    if (why == OUT_OF_MEMORY)
        PyErr_NoMemory();
    else if (why)
        PyErr_SetString(PyExc_ValueError, why);
    else if (landed->target)
        result = Py_BuildValue(
            "OOKK", positions, values, (unsigned long long)landed->digest.sum[0],
            (unsigned long long)landed->digest.sum[1]);
    else
        result = Py_BuildValue("OO", positions, values);
    if (!result && !why && landed->target) {
        if (listed)
            put_back(landed, k->unit);
        else
            swap_block(landed->target, NULL, landed->value, count, k->unit, landed->where, &landed->digest);
    }
    Py_XDECREF(positions);
    Py_XDECREF(values);
    return result;
}

static int known_block(const Classing *k, Py_ssize_t count, Py_ssize_t line, Py_ssize_t size) {
    if (!known_layout(k, k->unit, 0)) return 0;
    if (count >= 1 && count <= MOST && line >= 0 && !(line && count % line) && size >= 1) return 1;
    PyErr_SetString(PyExc_TypeError, "invalid block or line size");
    return 0;
}

static PyObject *py_decode_block(PyObject *self, PyObject *args) {
    PyObject *old_object, *result = NULL;
    Py_buffer data = {0}, old = {0};
    Classing k = {0};
    Py_ssize_t count, line;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*OnIIIn", &data, &old_object, &count, &k.unit, &k.exponent, &k.mantissa, &line))
        return NULL;
    if (!known_block(&k, count, line, data.len)) goto done;
    if (old_object != Py_None &&
        (PyObject_GetBuffer(old_object, &old, PyBUF_SIMPLE) < 0 || !fits(&old, count, k.unit, "old")))
        goto done;
    Landed landed = {0};
    result = decode_block(&data, old.buf, (size_t)count, (size_t)line, &k, &landed);
done:
    if (old.obj) PyBuffer_Release(&old);
    PyBuffer_Release(&data);
    return result;
}

static PyObject *py_patch_block(PyObject *self, PyObject *args) {
    PyObject *result = NULL;
    Py_buffer data = {0}, target = {0};
    Classing k = {0};
    int fresh;
    Landed landed = {0};
    Py_ssize_t line;
    unsigned long long start;
    (void)self;
    if (!PyArg_ParseTuple(
            args, "y*w*pIIInIK", &data, &target, &fresh, &k.unit, &k.exponent, &k.mantissa, &line, &landed.where.word,
            &start))
        return NULL;
    Py_ssize_t count = k.unit ? target.len / (Py_ssize_t)k.unit : 0;
    if (!known_block(&k, count, line, data.len) || !known_layout(&k, landed.where.word, target.len)) goto done;
    if (!fits(&target, count, k.unit, "target")) goto done;
    landed.where.start = start;
    landed.target = target.buf;
    result = decode_block(&data, fresh ? NULL : target.buf, (size_t)count, (size_t)line, &k, &landed);
done:
    PyBuffer_Release(&target);
    PyBuffer_Release(&data);
    return result;
}

/* Checks that a patch fits a block of `count` units and, on request, that its positions ascend. */
static int known_patch(
    PyObject *given, Py_buffer *positions, const Py_buffer *values, Py_ssize_t count, unsigned unit, int ascending) {
    if (given == Py_None) return fits(values, count, unit, "values");
    size_t changes = (size_t)values->len / unit, good = 0;
    if (PyObject_GetBuffer(given, positions, PyBUF_SIMPLE) < 0) return 0;
    if (!fits(values, (Py_ssize_t)changes, unit, "values") || !fits(positions, (Py_ssize_t)changes, 4, "positions"))
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

static PyObject *digest_sums(Digest digest) {
    return Py_BuildValue("KK", (unsigned long long)digest.sum[0], (unsigned long long)digest.sum[1]);
}

/* Exchanges the units of a patch and its block. Without `write`, only computes the change of the digest. */
static PyObject *swap_or_tell(PyObject *args, int write) {
    PyObject *positions_object, *result = NULL;
    Py_buffer block = {0}, positions = {0}, values = {0};
    Classing k = {0};
    Indexing where;
    unsigned long long start;
    if (!PyArg_ParseTuple(
            args, write ? "w*Ow*IIK" : "y*Oy*IIK", &block, &positions_object, &values, &k.unit, &where.word, &start))
        return NULL;
    where.start = start;
    if (!known_layout(&k, where.word, block.len)) goto done;
    if (!known_patch(positions_object, &positions, &values, block.len / (Py_ssize_t)k.unit, k.unit, !write)) goto done;
    Digest digest = {{0, 0}};
    size_t changes = (size_t)values.len / k.unit;
    Py_BEGIN_ALLOW_THREADS;
    if (write)
        swap_block(block.buf, positions.buf, values.buf, changes, k.unit, where, &digest);
    else
        digest_change(block.buf, positions.buf, values.buf, changes, k.unit, where, &digest);
    Py_END_ALLOW_THREADS;
    result = digest_sums(digest);
done:
    if (positions.obj) PyBuffer_Release(&positions);
    PyBuffer_Release(&block);
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
static PyObject *replace_block(uint8_t *target, const uint8_t *source, size_t count, unsigned unit) {
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
        put_units(target, replaced.position, replaced.value, replaced.count, unit);
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

static PyObject *py_replace_block(PyObject *self, PyObject *args) {
    PyObject *result = NULL;
    Py_buffer target = {0}, source = {0};
    Classing k = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "w*y*I", &target, &source, &k.unit)) return NULL;
    if (!known_layout(&k, k.unit, target.len)) goto done;
    Py_ssize_t count = target.len / (Py_ssize_t)k.unit;
    uintptr_t t = (uintptr_t)target.buf, s = (uintptr_t)source.buf;
    if (!fits(&source, count, k.unit, "source")) goto done;
    if (count > MOST)
        PyErr_SetString(PyExc_TypeError, "invalid block size");
    else if (t < s + (size_t)source.len && s < t + (size_t)target.len)
        PyErr_SetString(PyExc_TypeError, "target and source overlap");
    else
        result = replace_block(target.buf, source.buf, (size_t)count, k.unit);
done:
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    return result;
}

static PyObject *py_digest(PyObject *self, PyObject *args) {
    Py_buffer data = {0};
    Indexing where;
    unsigned long long start;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*IK", &data, &where.word, &start)) return NULL;
    where.start = start;
    Classing k = {where.word, 0, 0, 0, 0};
    PyObject *result = NULL;
    if (known_layout(&k, where.word, data.len)) {
        Digest digest;
        Py_BEGIN_ALLOW_THREADS;
        HOT(digest, data.buf, (size_t)data.len / where.word, where, &digest);
        Py_END_ALLOW_THREADS;
        result = digest_sums(digest);
    }
    PyBuffer_Release(&data);
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
     "encode_block(old|None, new, unit, exponent, mantissa, line, word, start) -> bytes, changed, digest change"},
    {"decode_block", py_decode_block, METH_VARARGS,
     "decode_block(data, old|None, count, unit, exponent, mantissa, line) -> positions|None, values"},
    {"patch_block", py_patch_block, METH_VARARGS,
     "patch_block(data, target, fresh, unit, exponent, mantissa, line, word, start) -> positions|None, old values, "
     "digest change"},
    {"swap_block", py_swap_block, METH_VARARGS,
     "swap_block(target, positions|None, values, unit, word, start) -> digest change; values become the old ones"},
    {"replace_block", py_replace_block, METH_VARARGS,
     "replace_block(target, source, unit) -> positions|None, old values; the target becomes the source"},
    {"digest_change", py_digest_change, METH_VARARGS,
     "digest_change(old, positions|None, values, unit, word, start) -> digest change; what a swap would do, unwritten"},
    {"digest", py_digest, METH_VARARGS, "digest(data, word, start) -> digest"},
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

/* A block that Python passed, and checks of what it said about it. Include Python.h before. */
#ifndef WW_BORROWED_BLOCK_H
#define WW_BORROWED_BLOCK_H

#include "digest.h"
#include "exponent_classes.h"

enum { MOST = 1 << 22 }; /* units in a block: ranks and distances must fit into 32 bits with room to spare */

/* A block that was passed as one buffer, or as a tuple with a buffer for each segment. */
typedef struct {
    Pieces pieces;
    Py_ssize_t size;
    Py_buffer one, *each;
    Py_ssize_t lent;
} Block;

static void give_back(Block *b) {
    for (Py_ssize_t i = 0; i < b->lent; i++) PyBuffer_Release(b->each ? &b->each[i] : &b->one);
    PyMem_Free(b->each);
    PyMem_Free((void *)(uintptr_t)b->pieces.each);
    memset(b, 0, sizeof *b);
}

static int borrow_each(PyObject *tuple, int flags, Block *b) {
    Py_ssize_t count = PyTuple_Size(tuple), segment = (Py_ssize_t)b->pieces.size;
    uint8_t **each = PyMem_Malloc((size_t)count * sizeof *each + 1);
    b->pieces.each = each;
    b->each = PyMem_Malloc((size_t)count * sizeof *b->each + 1);
    if (!each || !b->each) {
        PyErr_NoMemory();
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyObject_GetBuffer(PyTuple_GetItem(tuple, i), &b->each[i], flags) < 0) return 0;
        b->lent++;
        each[i] = b->each[i].buf;
        if (b->each[i].len != segment) {
            PyErr_Format(PyExc_TypeError, "a segment has %zd bytes, not %zd", b->each[i].len, segment);
            return 0;
        }
    }
    b->size = count * segment;
    return 1;
}

/* `segment` is in bytes. Give the block back in any case. */
static int borrow(PyObject *given, Py_ssize_t segment, int writable, Block *b) {
    int flags = writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    b->pieces.size = (size_t)segment;
    if (PyTuple_Check(given)) return borrow_each(given, flags, b);
    if (PyObject_GetBuffer(given, &b->one, flags) < 0) return 0;
    b->lent = 1;
    b->pieces.all = b->one.buf;
    b->size = b->one.len;
    return 1;
}

static int fits(Py_ssize_t size, Py_ssize_t count, unsigned unit, const char *what) {
    if (size == count * (Py_ssize_t)unit) return 1;
    PyErr_Format(PyExc_TypeError, "%s has %zd bytes, not %zd", what, size, count * (Py_ssize_t)unit);
    return 0;
}

static int known_units(const Classing *k, Py_ssize_t bytes) {
    unsigned unit = k->unit, bits = k->exponent + k->mantissa + 1;
    int good = (unit == 1 || unit == 2 || unit == 4 || unit == 8) && (k->exponent ? bits == 8 * unit : !k->mantissa);
    good = good && k->exponent <= 11 && bytes % (Py_ssize_t)unit == 0;
    if (!good) PyErr_SetString(PyExc_TypeError, "invalid unit layout");
    return good;
}

/* Checks that a segment consists of whole words. */
static int known_segment(const Classing *k, const Indexing *where) {
    size_t segment = where->segment, most = (size_t)1 << 58;
    if (!known_units(k, 0)) return 0;
    int good = where->word == k->unit || where->word == 8;
    if (good && segment && segment <= most && segment * k->unit % where->word == 0) return 1;
    PyErr_SetString(PyExc_TypeError, "invalid words or segments");
    return 0;
}

/* Checks that a block of so many bytes consists of whole segments. */
static int known_layout(const Classing *k, const Indexing *where, Py_ssize_t bytes) {
    if (bytes % (Py_ssize_t)(where->segment * k->unit) == 0) return 1;
    PyErr_SetString(PyExc_TypeError, "a block is not made of whole segments");
    return 0;
}

#endif

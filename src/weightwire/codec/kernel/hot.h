/* The hot loops for every instruction set, and the choice between them. */
#ifndef WW_HOT_H
#define WW_HOT_H

#include "dense.h"
#include "landing.h"
#include "replace.h"
#include "scan.h"

#define NAME(x) x##_portable
#define TARGET
#define VECTORS 0
#include "hot_loops.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define NAME(x) x##_256
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))
#define VECTORS 256
#include "hot_loops.h"

#define NAME(x) x##_512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vpopcntdq,avx512cd,avx2,bmi,bmi2,popcnt,lzcnt")))
#define VECTORS 512
#include "hot_loops.h"

/* The widest vectors of this machine. */
static int widest_vectors(void) {
    __builtin_cpu_init();
    int narrow = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
    int wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vpopcntdq") &&
               __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
    return narrow && wide ? 512 : narrow ? 256 : 0;
}

/* Calls the hot loop x for the vectors in use. */
#define HOT(x, ...) \
    (vectors == 512 ? x##_512(__VA_ARGS__) : vectors == 256 ? x##_256(__VA_ARGS__) : x##_portable(__VA_ARGS__))
#else
static int widest_vectors(void) { return 0; }
#define HOT(x, ...) x##_portable(__VA_ARGS__)
#endif

#endif

/* The hot loops for one instruction set: included by hot.h once for each, with
 *   NAME(x)   the name of x for this instruction set
 *   TARGET    the attribute that lets a function use it
 *   VECTORS   how wide its vectors are: 512 or 256 bits, or 0 for none
 *
 * All loops process chunks of 4096 weights in groups of 64. A mispredicted branch costs as much as a group, so loops
 * branch on the data once per chunk, not once per group.
 */

#define INLINE TARGET static inline __attribute__((always_inline))

#include "groups_loop.h"

#include "digest_loop.h"

#include "scan_loop.h"

#include "dense_loop.h"

#include "landing_loop.h"

#include "replace_loop.h"

#undef NAME
#undef TARGET
#undef VECTORS
#undef INLINE

// Memory that the system has yet to give.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "binding.h"

// The memory of a result, about to be written. What is large the C library takes from the system for each call, a fault for
// each page: here it is asked for in pages of 2 MiB, as NumPy does. The system need not heed it.
template <typename Result>
auto in_large_pages(Result& result) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 1 << 21;
  const uintptr_t first = uintptr_t(result->untyped_data()), last = first + result->size_bytes();
  const uintptr_t begin = (first + kPage - 1) / kPage * kPage, end = last / kPage * kPage;
  if (end > begin) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
  return result->untyped_data();
}

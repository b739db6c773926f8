// Memory that the system has yet to provide.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

// Asks for the memory of a result, about to be written, in pages of 2 MiB, as NumPy does: large arrays come from the
// system anew for each call, with a fault for each page. The system need not heed it.
template <typename T>
void prefer_large_pages(T* data, int64_t size) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 1 << 21;
  const uintptr_t first = uintptr_t(data), last = uintptr_t(data + size);
  const uintptr_t begin = (first + kPage - 1) / kPage * kPage, end = last / kPage * kPage;
  if (end > begin) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}

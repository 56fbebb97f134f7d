#include "isa.h"

#include <atomic>
#include <cstring>

namespace {

const MegarlKernels kernels[] = {
#ifdef MEGARL_X86
    {"avx512", megarl_avx512::logprob_local, megarl_avx512::logprob_backward, megarl_avx512::digest_line,
     megarl_avx512::gae_piece, megarl_avx512::gae_total},
    {"avx2", megarl_avx2::logprob_local, megarl_avx2::logprob_backward, megarl_avx2::digest_line,
     megarl_avx2::gae_piece, megarl_avx2::gae_total},
#endif
    {"generic", megarl_generic::logprob_local, megarl_generic::logprob_backward, megarl_generic::digest_line,
     megarl_generic::gae_piece, megarl_generic::gae_total},
};

bool supported(const char* name) {
#ifdef MEGARL_X86
  if (!std::strcmp(name, "avx512"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!std::strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return !std::strcmp(name, "generic");
}

const MegarlKernels* best() {
  for (const auto& k : kernels)
    if (supported(k.name)) return &k;
  return nullptr;  // not reached: generic is always supported
}

std::atomic<const MegarlKernels*> chosen{nullptr};

}  // namespace

const MegarlKernels& megarl::active() {
  const MegarlKernels* k = chosen.load(std::memory_order_acquire);
  if (!k) {
    k = best();
    chosen.store(k, std::memory_order_release);
  }
  return *k;
}

extern "C" const char* megarl_isa() { return megarl::active().name; }

extern "C" bool megarl_use_isa(const char* name) {
  for (const auto& k : kernels)
    if (!std::strcmp(k.name, name) && supported(name)) {
      chosen.store(&k, std::memory_order_release);
      return true;
    }
  return false;
}

#include "amx_permission.h"

#include <cstdint>

#if defined(HFCA_X86)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hfca {
namespace {

#if defined(HFCA_X86) && defined(__linux__)
constexpr const char* no_instructions = "the CPU has no AMX";

bool has_instructions() {
  constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25, wanted = bf16 | tile | int8, os_saves = 1u << 27;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & wanted) != wanted) return false;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & os_saves);
}

// XCR0: what the operating system saves when it switches between threads.
bool system_saves_tiles() {
  constexpr uint32_t shapes = 1u << 17, data = 1u << 18;
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & (shapes | data)) == (shapes | data);
}

const char* ask() {
  if (!has_instructions()) return no_instructions;
  if (!system_saves_tiles()) return "the operating system does not save AMX tiles";
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
  // It refuses where a thread has a signal stack too small for tiles, and some sandboxes refuse the call.
  if (syscall(SYS_arch_prctl, request, tile_data) != 0) return "the kernel refuses AMX tiles to this process (arch_prctl)";
  return nullptr;
}
#else
const char* ask() { return "there is no AMX on this platform"; }
#endif

}  // namespace

const char* no_tiles_because() {
  static const char* const reason = ask();
  return reason;
}

}  // namespace hfca

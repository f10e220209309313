// What the headers of today's gcc take from the newest glibc and libstdc++, so that the library also loads with those of manylinux_2_28
// (glibc 2.28, and libstdc++ of gcc 8). They are called by their symbols: nothing else is seen of them outside of this library.
// `make wheels` names a symbol that is missing here after an update of gcc.
#include <new>
#include <sstream>

#if defined(__GLIBC__) && defined(__GLIBCXX__)

// Whether the process has but one thread, since glibc 2.32. To lock although it has is never wrong.
extern "C" {
char __libc_single_threaded = 0;
}

namespace hfca {

[[noreturn]] void throw_bad_array_new_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");  // since gcc 11
void throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// Streams made without a mode, since gcc 9.
void make(std::stringstream* stream) __asm__("_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make(std::stringstream* stream) { new (stream) std::stringstream(std::ios_base::in | std::ios_base::out); }

void make(std::ostringstream* stream) __asm__("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make(std::ostringstream* stream) { new (stream) std::ostringstream(std::ios_base::out); }

}  // namespace hfca
#endif

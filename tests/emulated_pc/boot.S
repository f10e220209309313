# The first sector of a disk: turns on 32 bits, reads the parts of the disk that follow into memory, and jumps to Linux, as Linux's
# boot protocol asks (Documentation/arch/x86/boot.rst, 64 bits). The assembler's command line gives the addresses KERNEL, PARAMETERS and FILES,
# and how many parts of 256 sectors each of the three takes.
.code16
.globl _start
_start:
  cli
  xor %ax, %ax
  mov %ax, %ds
  in $0x92, %al             # the address line A20
  or $2, %al
  out %al, $0x92
  lgdt gdtr
  mov %cr0, %eax
  or $1, %eax
  mov %eax, %cr0
  ljmp $0x10, $protected
.code32
protected:
  mov $0x18, %ax
  mov %ax, %ds
  mov %ax, %es
  mov %ax, %ss
  mov $0x7c00, %esp
  cld
  mov $0x3f6, %dx           # the disk's interrupts off
  mov $2, %al
  out %al, %dx
  mov $256, %esi            # the boot sector has a part of its own
  mov $PARAMETERS, %edi
  mov $PARAMETERS_PARTS, %ebp
  call read
  mov $KERNEL, %edi
  mov $KERNEL_PARTS, %ebp
  call read
  mov $FILES, %edi
  mov $FILES_PARTS, %ebp
  call read
.include "long_mode.S"
  mov $PARAMETERS, %esi
  ljmp $0x20, $KERNEL

read:                       # %ebp parts from sector %esi on to %edi
  mov $0x1f2, %dx
  xor %al, %al              # 256 sectors
  out %al, %dx
  mov %esi, %eax
  inc %dx
  out %al, %dx
  shr $8, %eax
  inc %dx
  out %al, %dx
  shr $8, %eax
  inc %dx
  out %al, %dx
  mov %ah, %al
  or $0xe0, %al             # the first disk, by the number of a sector
  inc %dx
  out %al, %dx
  mov $0x20, %al            # read
  inc %dx
  out %al, %dx
  mov $256, %ebx
sector:
  mov $0x1f7, %dx
wait:
  in %dx, %al
  and $0x88, %al            # busy, and has data
  cmp $0x08, %al
  jne wait
  mov $0x1f0, %dx
  mov $256, %ecx
  rep insw                  # in words, which Bochs is fast at
  dec %ebx
  jnz sector
  add $256, %esi
  dec %ebp
  jnz read
  ret
.align 8
gdt:
  .quad 0, 0, 0x00CF9A000000FFFF, 0x00CF92000000FFFF, 0x00AF9A000000FFFF
gdtr:
  .word 39
  .long gdt
.org 510
.word 0xaa55

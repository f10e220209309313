# The first sector of a floppy disk: reads the sectors behind it to 0x10000, turns on 64 bits, SSE and the tiles of AMX, and jumps there.
# SECTORS, how many those are, is given by the assembler's command line.
.code16
.globl _start
_start:
  cli
  xor %ax, %ax
  mov %ax, %ds
  mov %ax, %es
  mov %ax, %ss
  mov $0x7c00, %sp
  mov %dl, drive
  mov $1, %si               # the number of a sector: 18 a track, 2 sides
  mov $0x1000, %bx          # the segment that it goes to
read:
  mov %si, %ax
  xor %dx, %dx
  mov $18, %cx
  div %cx
  mov %dl, %cl
  inc %cl                   # sectors count from one
  xor %dx, %dx
  mov $2, %di
  div %di
  mov %al, %ch
  mov %dl, %dh
  mov drive, %dl
  push %bx
  mov %bx, %es
  xor %bx, %bx
  mov $0x0201, %ax
  int $0x13
  pop %bx
  jc failed
  add $0x20, %bx
  inc %si
  cmp $SECTORS, %si
  jbe read
  cli                       # the BIOS may have allowed interrupts
  in $0x92, %al             # the address line A20
  or $2, %al
  out %al, $0x92
  xor %ax, %ax
  mov %ax, %es
  lgdt gdtr
.include "long_mode.S"
  ljmp $8, $long
failed:
  mov $'F', %al
  out %al, $0xe9
  hlt
.code64
long:
  mov $16, %ax
  mov %ax, %ds
  mov %ax, %es
  mov %ax, %ss
  mov $0x9f000, %rsp
  mov %cr4, %rax
  or $0x40000, %rax         # XSAVE
  mov %rax, %cr4
  xor %ecx, %ecx
  xor %edx, %edx
  mov $0x600e7, %eax        # XCR0: vectors, and tiles
  xsetbv
  mov $0x10000, %eax
  jmp *%rax
.align 8
gdt:
  .quad 0, 0x00209A0000000000, 0x0000920000000000
gdtr:
  .word 23
  .long gdt
drive:
  .byte 0
.org 510
.word 0xaa55

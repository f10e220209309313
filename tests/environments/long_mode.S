# From 16 or 32 bits to long mode, in segments that begin at 0: with page tables from 0x1000 on, for 512 pages of 2 MB, each where it is.
# A jump into a segment of 64 bits is to follow.
  mov $0x1000, %edi
  xor %eax, %eax
  mov $0xC00, %ecx
  rep stosl
  movl $0x2003, 0x1000
  movl $0x3003, 0x2000
  mov $0x3000, %edi
  mov $0x83, %eax
page:
  mov %eax, (%edi)
  add $8, %edi
  add $0x200000, %eax
  cmp $0x4000, %edi
  jne page
  mov $0x1000, %eax
  mov %eax, %cr3
  mov %cr4, %eax
  or $0x620, %eax           # PAE, and that SSE is known
  mov %eax, %cr4
  mov $0xC0000080, %ecx     # EFER: long mode
  rdmsr
  or $0x100, %eax
  wrmsr
  mov %cr0, %eax
  or $0x80000003, %eax      # pages, SSE, 32 bits
  and $0xfffffffb, %eax
  mov %eax, %cr0

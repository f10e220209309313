// Loaded through torch.ops.load_library; the empty Python module exists so that the build's extension is importable too.
#include <Python.h>

extern "C" PyObject* PyInit__C(void) {
  static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}

// String arguments of ops.
//
// For std::string, torch's stable ABI makes a new one of what it was handed and never deletes it: 48 bytes for each call of an op.
#pragma once
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <string>

namespace hfca {

struct Text : std::string {
  using std::string::string;
};

}  // namespace hfca

namespace torch::stable::detail {

template <>
struct ToImpl<hfca::Text> {
  static hfca::Text call(StableIValue value, uint64_t /*extension_build_version*/, bool /*is_internal*/) {
    const StringHandle handle = torch::stable::detail::to<StringHandle>(value);
    size_t length;
    const char* data;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    hfca::Text text(data, length);
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

}  // namespace torch::stable::detail

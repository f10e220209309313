// embedding_norm: schema, checks, the rows that every token asks for, call.
#include <stdexcept>

#include "../dispatch.h"
#include "../tensors.h"
#include "../workspace.h"

namespace hfca {
namespace {

// A matrix of ids [batch or 1, length] under any strides.
struct Ids {
  const void* data;
  bool wide;  // int64, else int32
  int64_t batch_stride, stride;

  int64_t at(int64_t batch, int64_t position) const {
    const int64_t offset = batch * batch_stride + position * stride;
    return wide ? static_cast<const int64_t*>(data)[offset] : static_cast<const int32_t*>(data)[offset];
  }
};

Ids as_ids(const Tensor& t, int64_t batch, int64_t length, const char* name) {
  const bool wide = t.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(wide || t.scalar_type() == ScalarType::Int, "hf_cpu_accel::embedding_norm: ", name, " must be int64 or int32");
  STD_TORCH_CHECK(t.is_cpu() && t.dim() == 2 && (t.size(0) == batch || t.size(0) == 1) && t.size(1) == length,
                  "hf_cpu_accel::embedding_norm: ", name, " must be on the CPU, of shape [", batch, " or 1, ", length, "]");
  return {t.mutable_data_ptr(), wide, t.size(0) == 1 ? 0 : t.stride(0), t.stride(1)};
}

// The rows of one table that the tokens ask for.
class Rows {
 public:
  Rows(int32_t* index, int64_t table_rows, const char* name) : index_(index), table_rows_(table_rows), name_(name) {}

  void push(int64_t row) {
    if (row < 0 || row >= table_rows_)  // an IndexError in Python, as torch's lookup raises
      throw std::out_of_range("hf_cpu_accel::embedding_norm: index out of range: " + std::string(name_) + " " + std::to_string(row) +
                              " of a table of " + std::to_string(table_rows_) + " rows");
    *index_++ = static_cast<int32_t>(row);
  }

 private:
  int32_t* index_;
  int64_t table_rows_;
  const char* name_;
};

Matrix as_table(const Tensor& t, const Tensor& words, Tensor& keep, const int32_t* index, const char* name) {
  check_floating(t, "embedding_norm", name);
  STD_TORCH_CHECK(t.dim() == 2 && t.size(1) == words.size(1) && t.scalar_type() == words.scalar_type(),
                  "hf_cpu_accel::embedding_norm: ", name, " must have ", words.size(1), " columns and the dtype of words");
  STD_TORCH_CHECK(t.size(0) <= INT32_MAX, "hf_cpu_accel::embedding_norm: ", name, " must have less than 2^31 rows");
  Matrix table = as_rows(t, keep);
  table.index = index;
  return table;
}

Tensor embedding_norm(const Tensor& ids, const Tensor& words, const OptionalTensor& type_ids, const OptionalTensor& types,
                      const OptionalTensor& position_ids, const OptionalTensor& positions, int64_t first_position,
                      std::optional<int64_t> padding_id, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  STD_TORCH_CHECK(ids.dim() == 2 && words.dim() == 2, "hf_cpu_accel::embedding_norm: ids and words must have two dimensions");
  STD_TORCH_CHECK(types || !type_ids, "hf_cpu_accel::embedding_norm: type_ids need types");
  STD_TORCH_CHECK(positions || !position_ids, "hf_cpu_accel::embedding_norm: position_ids need positions");
  constexpr int64_t most = int64_t{1} << 48;  // positions that are counted from there stay within an int64
  STD_TORCH_CHECK(-most <= first_position && first_position <= most, "hf_cpu_accel::embedding_norm: no table has a position ",
                  first_position);
  const int64_t batch = ids.size(0), length = ids.size(1), tokens = batch * length, columns = words.size(1);
  Workspace indices(max_tables * Workspace::size_of<int32_t>(tokens));
  EmbeddingNorm embedding;
  Tensor keep[max_tables] = {words, words, words};
  // Adds a table; row_of(batch, position) is called once per token, in their order.
  const auto add = [&](const Tensor& table, const char* table_name, const char* row_name, auto row_of) {
    int32_t* index = indices.take<int32_t>(tokens);
    const int number = embedding.table_count++;
    embedding.tables[number] = as_table(table, words, keep[number], index, table_name);
    Rows rows(index, table.size(0), row_name);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t l = 0; l < length; ++l) rows.push(row_of(b, l));
  };
  const Ids word_ids = as_ids(ids, batch, length, "ids");
  add(words, "words", "id", [&](int64_t b, int64_t l) { return word_ids.at(b, l); });
  if (types && type_ids) {
    const Ids given = as_ids(*type_ids, batch, length, "type_ids");
    add(*types, "types", "type id", [&](int64_t b, int64_t l) { return given.at(b, l); });
  } else if (types) {
    add(*types, "types", "type id", [](int64_t, int64_t) { return int64_t{0}; });
  }
  if (positions && position_ids) {
    const Ids given = as_ids(*position_ids, batch, length, "position_ids");
    add(*positions, "positions", "position", [&](int64_t b, int64_t l) { return given.at(b, l); });
  } else if (positions && padding_id) {
    int64_t next = 0;
    add(*positions, "positions", "position", [&](int64_t b, int64_t l) {
      if (l == 0) next = first_position;
      return word_ids.at(b, l) == *padding_id ? first_position - 1 : next++;
    });
  } else if (positions) {
    add(*positions, "positions", "position", [&](int64_t, int64_t l) { return first_position + l; });
  }
  embedding.norm.columns = columns;
  embedding.norm.eps = static_cast<float>(eps);
  embedding.norm.weight = as_vector(weight, columns, "embedding_norm", "weight");
  embedding.norm.bias = as_vector(bias, columns, "embedding_norm", "bias");
  Tensor output = empty_of(words, {batch, length, columns});
  embedding.norm.output = {output.mutable_data_ptr(), columns, is_bf16(output)};
  if (tokens == 0 || columns == 0) return output;
  const auto kernel = dispatch().kernels.embedding_norm;
  torch::stable::parallel_for(0, tokens, 1 + grain_elements / columns, [&](int64_t begin, int64_t end) {
    const int64_t count = norm_buffer_rows * columns;
    Workspace workspace(Workspace::size_of<float>(count));
    const EmbeddingNorm mine = embedding;  // not on the calling thread's stack: see gemm/driver.h
    kernel(mine, begin, end, workspace.take<float>(count));
  });
  return output;
}

}  // namespace
}  // namespace hfca

HFCA_OP(embedding_norm,
        "(Tensor ids, Tensor words, Tensor? type_ids, Tensor? types, Tensor? position_ids, Tensor? positions, int first_position, "
        "int? padding_id, Tensor? weight, Tensor? bias, float eps) -> Tensor")

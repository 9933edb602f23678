// Runs a package made by AOTInductor in a process without Python.
//
//   run_package PACKAGE INPUTS OUTPUTS LIBRARY...
//
// INPUTS and OUTPUTS hold tensors one after another: a line of text, "dtype dims size...", then the bytes. The dtype is
// its number in torch's ScalarType.
#include <ATen/ops/empty.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

std::vector<at::Tensor> read_tensors(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<at::Tensor> tensors;
    int dtype, dims;
    while (file >> dtype >> dims) {
        std::vector<int64_t> sizes(dims);
        for (int64_t& size : sizes) file >> size;
        file.get();  // the end of the line
        at::Tensor tensor = at::empty(sizes, static_cast<at::ScalarType>(dtype));
        file.read(static_cast<char*>(tensor.mutable_data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
        tensors.push_back(tensor);
    }
    return tensors;
}

void write_tensors(const std::string& path, const std::vector<at::Tensor>& tensors) {
    std::ofstream file(path, std::ios::binary);
    for (const at::Tensor& tensor : tensors) {
        file << static_cast<int>(tensor.scalar_type()) << ' ' << tensor.dim();
        for (int64_t size : tensor.sizes()) file << ' ' << size;
        file << '\n';
        const at::Tensor plain = tensor.contiguous();
        file.write(static_cast<const char*>(plain.const_data_ptr()), static_cast<std::streamsize>(plain.nbytes()));
    }
}

void refuse_python() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);)
        if (line.find("libpython") != std::string::npos || line.find("libtorch_python") != std::string::npos)
            throw std::runtime_error("Python is in this process: " + line);
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const std::vector<std::string> args(argv + 1, argv + argc);
        for (size_t i = 3; i < args.size(); i++)
            if (dlopen(args[i].c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
        torch::inductor::AOTIModelPackageLoader package(args.at(0));
        write_tensors(args.at(2), package.run(read_tensors(args.at(1))));
        refuse_python();
    } catch (const std::exception& error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
}

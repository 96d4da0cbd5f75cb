import time, ctypes, statistics, random
import torch, cupy
import cupy_mla
from cupy_mla.cuda import driver, cache, all_kernels
from cupy_mla.calls import signature, program, graph
from cupy_mla.layouts import V32_FP8
torch.zeros(1,device="cuda"); driver.current_device()
def t(name, f, n=400):
    for _ in range(20): f()
    torch.cuda.synchronize(); ts=[]
    for _ in range(n//16):
        torch.cuda.synchronize()
        for _ in range(16):
            s=time.perf_counter_ns(); f(); ts.append(time.perf_counter_ns()-s)
    print(f"{name:50s} {statistics.median(ts)/1e3:.2f}", flush=True)
code=r'extern "C" __global__ void k(const __grid_constant__ struct P { char c[96]; } p) {}' 
src='struct P{char c[96];}; extern "C" __global__ void k(P p){}'
k=cupy.RawModule(code=src).get_function("k"); h=k.kernel.ptr
plain=driver.plain_submitter(h,256,0,False); ex=driver.attribute_submitter(h,256,0,False); exo=driver.attribute_submitter(h,256,0,True)
par=b"x"*96
t("cupy launchKernel", lambda: plain(0,100,1,1,par,1))
t("bindings Ex no attr", lambda: ex(0,100,1,1,par,1))
t("bindings Ex overlap", lambda: exo(0,100,1,1,par,1))
i=[0]
def vary():
    i[0]+=1; ex(0,100+i[0]%50,1,1,par,1)
t("bindings Ex no attr varying grid", vary)
api=driver.api()
def cu():
    ptr=ctypes.c_char_p(par); api.cuLaunchKernel(h,100,1,1,256,1,1,0,0,ctypes.addressof(ptr),0)
t("bindings cuLaunchKernel", cu)
lib=ctypes.CDLL("libcuda.so.1"); f=lib.cuLaunchKernel; f.argtypes=(ctypes.c_void_p,)+(ctypes.c_uint,)*7+(ctypes.c_void_p,)*3
def ct():
    ptr=ctypes.c_char_p(par); f(h,100,1,1,256,1,1,0,0,ctypes.addressof(ptr),0)
t("ctypes cuLaunchKernel", ct)
st=torch.cuda.current_stream().cuda_stream; print("torch stream", st)
# pack
cachet=torch.zeros(512,64,656,dtype=torch.uint8,device="cuda"); kvc=torch.zeros(5000,512,dtype=torch.bfloat16,device="cuda"); kpe=torch.zeros(5000,64,dtype=torch.bfloat16,device="cuda"); slots=torch.arange(5000,device="cuda")
a=(kvc[:100],kpe[:100],cachet,slots[:100])
t("pack 100", lambda: cupy_mla.concat_and_cache_mla(*a))
b=(kvc[:4000],kpe[:4000],cachet,slots[:4000])
t("pack 4000", lambda: cupy_mla.concat_and_cache_mla(*b))
q=torch.zeros(300,1,128,576,device="cuda",dtype=torch.bfloat16); idx=torch.zeros(300,1,2048,device="cuda",dtype=torch.int32)
sched=cupy_mla.get_mla_metadata()[0]
q1,i1=q[:1],idx[:1]
t("decode b1", lambda: cupy_mla.sparse_decode(q1,cachet,i1))
q2,i2=q[:128],idx[:128]
t("decode b128", lambda: cupy_mla.sparse_decode(q2,cachet,i2))
kv=torch.zeros(8192,1,576,dtype=torch.bfloat16,device="cuda"); qq=torch.zeros(2,512,16,576,device="cuda",dtype=torch.bfloat16); ii=torch.zeros(512,1,1024,device="cuda",dtype=torch.int32)
t("prefill16 same", lambda: cupy_mla.sparse_prefill(qq[0],kv,ii,0.1))
j=[0]
qs=[qq[0],qq[1]]
def turn():
    j[0]^=1; cupy_mla.sparse_prefill(qs[j[0]],kv,ii,0.1)
t("prefill16 two in turn", turn)
sl=[(qq[0][:n],ii[:n]) for n in random.Random(0).sample(range(100,512),200)]
n=[0]
def nw():
    a,b=sl[n[0]%200]; n[0]+=1; cupy_mla.sparse_prefill(a,kv,b,0.1)
t("prefill16 varying", nw, 320)
sd=[(q[:n],idx[:n]) for n in random.Random(0).sample(range(1,300),200)]
def nd():
    a,b=sd[n[0]%200]; n[0]+=1; cupy_mla.sparse_decode(a,cachet,b)
t("decode varying", nd, 320)
import cProfile, pstats
signature.forget_calls()
for a,b in sd[:150]: cupy_mla.sparse_decode(a,cachet,b)
pr=cProfile.Profile(); pr.enable()
for a,b in sd[150:]: cupy_mla.sparse_decode(a,cachet,b)
pr.disable(); pstats.Stats(pr).sort_stats("tottime").print_stats(12)

"""Ordinary log text, the prior for a log that has not been read yet."""

WORDS = (
    b" and for the from with not was are has have this that when will into over than all its of to in is on at by "
    b"as or info debug warning trace notice error errors failed failure exception using found loaded loading load "
    b"model models weights checkpoint checkpoints saved saving save file files path directory step steps epoch "
    b"batch size iteration iter loss train training validation valid eval evaluation test data dataset dataloader "
    b"loader worker workers rank local global world node nodes host port address server client service request "
    b"requests response running waiting queue pending started starting start finished completed complete done "
    b"total number count time times seconds elapsed remaining throughput tokens token sequence length samples "
    b"items input output prompt generation decode prefill cache memory allocated reserved device devices driver "
    b"process processes group groups backend initialized initialize initializing communicator channel ring tree "
    b"via socket network connection connected connect timeout retry retrying attempt version python torch module "
    b"lib site packages line call function return config configuration default parameter parameters value values "
    b"type name none null true false layer layers attention nccl cuda gpu cpu it hidden norm grad gradient "
    b"learning rate optimizer scheduler scale bytes read write open close stream thread task tasks job user state "
    b"status available enabled disabled set get post http https CUDA NCCL INFO WARNING DEBUG ERROR GPU CPU POST "
    b"GET HTTP Loading Loaded Saving Saved Starting Started Using Epoch Batch Step Train Test Validation Running "
    b"Finished Processed Error Warning Time Total Memory Process Worker Rank Model File Failed Connection "
    b"completions shard shards fetched store flush buffer page pages row rows segment metrics progress update "
    b"gateway proxy router endpoint keep alive reader readers writer writers slot slots index key keys table "
    b"tables column query schema record records event events message messages handler handle handles calls called "
    b"install installed installing removed added known unknown exit exited kill killed allocating allocation "
    b"corresponding following across back able enable reset invalid missing detected required supported optional "
    b"target source result results summary report average mean max min best score "
)  # frequent words of ordinary logs

LINES = b"""\
2027-11-03 08:14:52,317 - INFO - root - Setting up the run in /home/user/project/outputs/run-0042/seed_1
2027-11-03T08:14:53.004561Z  WARN tracing_server::handler: the body of request 8c1f0e77 was 10485 bytes long
I1103 08:14:53.912004 140233 executor.cc:218] Assigned 4096 blocks on device 3; 17.52 GiB are left
[rank3]:[W1103 08:14:55.201344 Process.cpp:1496] Warning: destroy was not called before the program ends (function main)
/usr/lib/python3/dist-packages/numpy/core/fromnumeric.py:3474: RuntimeWarning: Mean of empty slice.
  return _methods._mean(a, axis=axis, dtype=dtype, out=out, **kwargs)
Nov 03 08:15:01 node-017 systemd[1]: Started Session 2214 of user alice.
[2027-11-03 08:15:02,777] [DEBUG] [engine.py:1873:step] micro=16 lr=[2.9e-05] mom=[(0.9, 0.95)] wall=1.237e+03
{"time": "2027-11-03T08:15:03", "level": "info", "msg": "window moved", "from": 120394, "to": 128586, "ok": true}
{'loss': 1.8364, 'grad_norm': 0.4412, 'learning_rate': 1.9875e-05, 'epoch': 0.37}
 37%|###7      | 3702/10000 [12:41<21:35,  4.86it/s, loss=1.84, v_num=12]
step=  18450 | tokens/sec: 391,204.7 | mfu: 43.18% | loss 2.104331 | grad 0.731 | lr 2.871e-04
(Worker_TP1 pid=88213) INFO 11-03 08:15:07 [loader.py:447] Weights took 21.46 seconds, 15.2671 GiB
node017:88213:88671 [2] NCCL INFO Connected all trees, 24 coll channels, 0 collnet channels, 8 nvls channels
"GET /metrics HTTP/1.1" 200 - 10.12.0.44:51872 "Mozilla/5.0 (X11; Linux x86_64)" 0.004
    at org.example.pipeline.Stage.apply(Stage.java:412) ~[pipeline-2.7.1.jar:2.7.1]
>>> sampled 512 of 131072 documents, seed=1337, sha256=9f86d081884c7d659a2feaa0c55ad015a3bf4f1b
Validation Epoch 12: acc@1 71.236 acc@5 90.418 time 0.213 (0.219)
"""  # typical lines of many programs

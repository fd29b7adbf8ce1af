BEGIN TRANSACTION;
CREATE TABLE arms (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	fingerprint_id INTEGER NOT NULL, 
	engine TEXT, 
	family TEXT, 
	engine_version TEXT, 
	program TEXT, 
	model_path TEXT, 
	argv JSON, 
	environment JSON NOT NULL, 
	origins JSON NOT NULL, 
	generation INTEGER, 
	CONSTRAINT pk_arms PRIMARY KEY (id), 
	CONSTRAINT uq_arms_run_id UNIQUE (run_id, name), 
	CONSTRAINT fk_arms_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_arms_fingerprint_id FOREIGN KEY(fingerprint_id) REFERENCES fingerprints (id) ON DELETE RESTRICT
);
INSERT INTO "arms" VALUES(1,1,'live',1,'fake','mainline','0 (unknown)','/srv/box/engine/llama-server','/srv/box/tiny.gguf','["/srv/box/engine/llama-server", "--model", "/srv/box/tiny.gguf", "--alias", "designed", "--host", "127.0.0.1", "--port", "57323", "--ctx-size", "1024", "--predict", "256", "--parallel", "1", "--flash-attn", "on", "--threads", "1", "--threads-batch", "1", "--ctx-checkpoints", "4", "--cache-ram", "0", "--no-context-shift", "--jinja", "--metrics", "--log-verbosity", "4", "--spec-type", "draft-mtp", "--spec-draft-n-max", "4", "--spec-draft-p-min", "0.0"]','{}','[["--model /srv/box/tiny.gguf", "model.path", "/srv/box/config/profiles/night.toml"], ["--alias designed", "serving.alias", "cpu-embedded.toml"], ["--host 127.0.0.1", "serving.host", "tunerd: nobody else is let in unless a profile says so"], ["--port 57323", "serving.port", "/srv/box/config/profiles/night.toml"], ["--ctx-size 1024", "serving.ctx_size", "/srv/box/config/profiles/night.toml"], ["--predict 256", "serving.n_predict", "cpu-embedded.toml"], ["--parallel 1", "serving.n_parallel", "tunerd: builds differ (1, auto = 4), and speculation wants one slot"], ["--flash-attn on", "serving.flash_attn", "tunerd: a quantised KV cache needs it, and builds differ"], ["--threads 1", "serving.threads", "cpu-embedded.toml"], ["--threads-batch 1", "serving.threads_batch", "cpu-embedded.toml"], ["--ctx-checkpoints 4", "serving.ctx_checkpoints", "cpu-embedded.toml"], ["--cache-ram 0", "serving.cache_ram_mib", "cpu-embedded.toml"], ["--no-context-shift", "serving.context_shift", "tunerd: silently dropping context is worse than an error"], ["--jinja", "serving.jinja", "tunerd: tool calls and most templates need it, and builds differ"], ["--metrics", "serving.metrics", "/srv/box/config/profiles/night.toml"], ["--log-verbosity 4", "serving.log_verbosity", "tunerd: memory and placement lines are at level 4 since May 2026"], ["--spec-type draft-mtp", "speculation.type", "/srv/box/config/profiles/night.toml"], ["--spec-draft-n-max 4", "speculation.n_max", "/srv/box/config/profiles/night.toml"], ["--spec-draft-p-min 0.0", "speculation.p_min", "/srv/box/config/profiles/night.toml"], ["(left out: no usable GPU)", "memory.fit_mib", "tunerd: the engines'' own margin, stated because builds differ"]]',3);
INSERT INTO "arms" VALUES(2,2,'fake, mtp 4/0, margin 0, kv f16, ub 512, b 2048, t 1',2,'fake','mainline','0 (unknown)','/srv/box/engine/llama-server','/srv/box/tiny.gguf','["/srv/box/engine/llama-server", "--model", "/srv/box/tiny.gguf", "--alias", "designed", "--host", "127.0.0.1", "--port", "57323", "--ctx-size", "1024", "--predict", "256", "--parallel", "1", "--flash-attn", "on", "--threads", "1", "--threads-batch", "1", "--ctx-checkpoints", "4", "--cache-ram", "0", "--no-context-shift", "--jinja", "--metrics", "--log-verbosity", "4", "--spec-type", "draft-mtp", "--spec-draft-n-max", "4", "--spec-draft-p-min", "0.0"]','{}','[]',NULL);
INSERT INTO "arms" VALUES(3,2,'fake, no speculation, margin 0, kv f16, ub 512, b 2048, t 1',3,'fake','mainline','0 (unknown)','/srv/box/engine/llama-server','/srv/box/tiny.gguf','["/srv/box/engine/llama-server", "--model", "/srv/box/tiny.gguf", "--alias", "designed", "--host", "127.0.0.1", "--port", "57323", "--ctx-size", "1024", "--predict", "256", "--parallel", "1", "--flash-attn", "on", "--threads", "1", "--threads-batch", "1", "--ctx-checkpoints", "4", "--cache-ram", "0", "--no-context-shift", "--jinja", "--metrics", "--log-verbosity", "4"]','{}','[]',NULL);
CREATE TABLE fingerprints (
	id INTEGER NOT NULL, 
	sha256 TEXT NOT NULL, 
	parts JSON NOT NULL, 
	CONSTRAINT pk_fingerprints PRIMARY KEY (id), 
	CONSTRAINT uq_fingerprints_sha256 UNIQUE (sha256)
);
INSERT INTO "fingerprints" VALUES(1,'9f6a17d63f34cabea4e4b23579d7db4384626f93c7843aa98772cf5c815cb5c2','{"schema": 1, "engine_sha256": "ca46b7227c672a687549c168c67f890152a9f74032b01f3d2cfd081eb35d6fd3", "driver_version": null, "gpu_names": [], "power_limits_w": [], "cpu_model": "AMD EPYC", "model_sha256": "3fae1824da1c9c2efa71e070d7174f7007bdedfd88920b172536fb5279fcadcf", "template_sha256": "482fb8ea68812a112a7cf3a0a967f6b02cde03fcd3177508e2f0c317ac2d8653", "arguments_sha256": "faa373ea1e7ee6551a568fc1177c0fd84a4120bc25d2ae03074f2a630c9144c1", "workload_sha256": null, "tunerd_version": "0.1.0"}');
INSERT INTO "fingerprints" VALUES(2,'3eadd56c3379ab386e97460c3e40740f1ba81387e56c9597f88dd3955e9c26b6','{"schema": 1, "engine_sha256": "ca46b7227c672a687549c168c67f890152a9f74032b01f3d2cfd081eb35d6fd3", "driver_version": null, "gpu_names": [], "power_limits_w": [], "cpu_model": "AMD EPYC", "model_sha256": "3fae1824da1c9c2efa71e070d7174f7007bdedfd88920b172536fb5279fcadcf", "template_sha256": "482fb8ea68812a112a7cf3a0a967f6b02cde03fcd3177508e2f0c317ac2d8653", "arguments_sha256": "faa373ea1e7ee6551a568fc1177c0fd84a4120bc25d2ae03074f2a630c9144c1", "workload_sha256": "ac4714e2508006923541ee48e981013067ebad05e2f0e990dac8d0a32aafee2e", "tunerd_version": "0.1.0"}');
INSERT INTO "fingerprints" VALUES(3,'d57893002d38bb869d1e63c4aac5740e81aca0371d242b1a2e0f417f5cafe75b','{"schema": 1, "engine_sha256": "ca46b7227c672a687549c168c67f890152a9f74032b01f3d2cfd081eb35d6fd3", "driver_version": null, "gpu_names": [], "power_limits_w": [], "cpu_model": "AMD EPYC", "model_sha256": "3fae1824da1c9c2efa71e070d7174f7007bdedfd88920b172536fb5279fcadcf", "template_sha256": "482fb8ea68812a112a7cf3a0a967f6b02cde03fcd3177508e2f0c317ac2d8653", "arguments_sha256": "f821605d76523d99401a8f96e99f96deff7f39d3e7ad7c6df7f056b799335ec3", "workload_sha256": "ac4714e2508006923541ee48e981013067ebad05e2f0e990dac8d0a32aafee2e", "tunerd_version": "0.1.0"}');
CREATE TABLE memory_loads (
	id INTEGER NOT NULL, 
	fingerprint_id INTEGER NOT NULL, 
	memory_key TEXT NOT NULL, 
	observed_s DOUBLE NOT NULL, 
	CONSTRAINT pk_memory_loads PRIMARY KEY (id), 
	CONSTRAINT fk_memory_loads_fingerprint_id FOREIGN KEY(fingerprint_id) REFERENCES fingerprints (id) ON DELETE RESTRICT
);
CREATE TABLE memory_observations (
	id INTEGER NOT NULL, 
	load_id INTEGER NOT NULL, 
	device TEXT NOT NULL, 
	part_group TEXT NOT NULL, 
	estimated_mib DOUBLE, 
	reported_mib DOUBLE NOT NULL, 
	CONSTRAINT pk_memory_observations PRIMARY KEY (id), 
	CONSTRAINT fk_memory_observations_load_id FOREIGN KEY(load_id) REFERENCES memory_loads (id) ON DELETE CASCADE
);
CREATE TABLE runs (
	id INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	suites JSON NOT NULL, 
	started_s DOUBLE NOT NULL, 
	ended_s DOUBLE, 
	outcome TEXT, 
	reason TEXT, 
	target TEXT NOT NULL, 
	seed BIGINT, 
	unit TEXT, 
	profile TEXT, 
	model_name TEXT, 
	workload TEXT, 
	tunerd_version TEXT, 
	host JSON NOT NULL, 
	CONSTRAINT pk_runs PRIMARY KEY (id)
);
INSERT INTO "runs" VALUES(1,'bench','["mtp"]',1.7953843458468136787e+09,1.79538436220862770075e+09,'done',NULL,'live',1789808139,'llama-server.service','night','designed',NULL,'0.1.0','{"kernel": "6.18.44-fc-v657", "cpu": "AMD EPYC", "gpus": [], "driver": null, "memory": {"total_mib": 24105}}');
INSERT INTO "runs" VALUES(2,'sweep','["workload"]',1.7953843633612453938e+09,1.79538436451969218255e+09,'done',NULL,'night, 3 configurations',3,'llama-server.service','night','tunerd designed model','small','0.1.0','{}');
CREATE TABLE samples (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	arm_id INTEGER NOT NULL, 
	suite TEXT NOT NULL, 
	case_name TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	prompt_id TEXT NOT NULL, 
	process TEXT NOT NULL, 
	position INTEGER NOT NULL, 
	at_s DOUBLE NOT NULL, 
	n_predict INTEGER NOT NULL, 
	concurrency INTEGER NOT NULL, 
	has_timings BOOLEAN NOT NULL, 
	cache_n INTEGER, 
	prompt_n INTEGER, 
	prompt_ms DOUBLE, 
	predicted_n INTEGER, 
	predicted_ms DOUBLE, 
	draft_n INTEGER, 
	draft_n_accepted INTEGER, 
	accepted_by_position JSON, 
	wall_ms DOUBLE, 
	ttft_ms DOUBLE, 
	vram_free_min_mib INTEGER, 
	marks JSON NOT NULL, 
	problem TEXT, 
	is_usable BOOLEAN NOT NULL, 
	details JSON NOT NULL, 
	CONSTRAINT pk_samples PRIMARY KEY (id), 
	CONSTRAINT fk_samples_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_samples_arm_id FOREIGN KEY(arm_id) REFERENCES arms (id) ON DELETE CASCADE
);
INSERT INTO "samples" VALUES(1,1,1,'mtp','warm-up','code_python','code_python-12#5a297fdb','7b3c60cef3124d7f98b6beeede228859',0,1.79538434598766708373e+09,64,1,1,0,62,3.1,64,451.625,223,5,NULL,4.84204696999995576334e+02,6.0700480000832612859e+00,NULL,'["warm-up"]',NULL,0,'{"cached": 0}');
INSERT INTO "samples" VALUES(2,1,1,'mtp','creative_short','creative_short','creative_short-4#c0dc2390','7b3c60cef3124d7f98b6beeede228859',1,1.79538434647439312935e+09,192,1,1,0,31,1.55,192,1426.25,710,11,NULL,1.51054909000004045083e+03,4.69292100001439393963e+00,NULL,'[]',NULL,1,'{"cached": 0}');
INSERT INTO "samples" VALUES(3,1,1,'mtp','translation','translation','translation-2#500a5572','7b3c60cef3124d7f98b6beeede228859',2,1.7953843479888086319e+09,192,1,1,0,37,1.85,192,1402.25,698,14,NULL,1.47835718100009216868e+03,5.12260400000741356052e+00,NULL,'[]',NULL,1,'{"cached": 0}');
INSERT INTO "samples" VALUES(4,1,1,'mtp','explain_concept','explain_concept','explain_concept-20#fdada414','7b3c60cef3124d7f98b6beeede228859',3,1.79538434947048473359e+09,192,1,1,0,50,2.5,192,1474.25,734,5,NULL,1.55720106599994778662e+03,6.32526100002905877772e+00,NULL,'[]',NULL,1,'{"cached": 0}');
CREATE TABLE schema_versions (
	version INTEGER NOT NULL, 
	written_by TEXT NOT NULL, 
	CONSTRAINT pk_schema_versions PRIMARY KEY (version)
);
INSERT INTO "schema_versions" VALUES(3,'tunerd 0.1.0');
CREATE TABLE summaries (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	arm_id INTEGER, 
	suite TEXT NOT NULL, 
	name TEXT NOT NULL, 
	figures JSON NOT NULL, 
	CONSTRAINT pk_summaries PRIMARY KEY (id), 
	CONSTRAINT fk_summaries_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE, 
	CONSTRAINT fk_summaries_arm_id FOREIGN KEY(arm_id) REFERENCES arms (id) ON DELETE CASCADE
);
INSERT INTO "summaries" VALUES(1,1,1,'mtp','acceptance by position','{"ratios": [0.055819477434679333, 0.0017814726840855108, 0.0005938242280285036]}');
INSERT INTO "summaries" VALUES(2,2,NULL,'sweep','sweep plan','{"profile": "night", "generation": 3, "workload": "small", "budget_s": 7200.0, "seed": 3, "incumbent": {"engine": "fake", "spec": "mtp", "n_max": 4, "p_min": 0.0, "fit_mib": 0, "kv": "f16", "ubatch": 512, "batch": 2048, "threads": 1, "extra": []}, "incumbent_text": "fake, mtp 4/0, margin 0, kv f16, ub 512, b 2048, t 1", "families": [{"engine": "fake", "speculation": "mtp", "n_max": [2, 4], "p_min": [0.0], "fit_mib": [0], "kv": ["f16"], "ubatch": [512], "batch": [2048], "threads": [1], "extra": [[]]}, {"engine": "fake", "speculation": "off", "n_max": [0], "p_min": [0.0], "fit_mib": [0], "kv": ["f16"], "ubatch": [512], "batch": [2048], "threads": [1], "extra": [[]]}], "points": 3, "left_out": [{"what": "embedded", "reason": "engine.prefer of [sweep] does not list it"}, {"what": "memory.fit_mib", "reason": "there is no GPU whose memory could be left free"}, {"what": "frozen placement", "reason": "there is no GPU: everything lies in RAM, with speculation and without"}], "per_request": [], "seeds": [], "rejected": [], "forecast": {"process_s": 3.7371556952693012, "starts": 1926, "verdict_s": 59.79449112430882, "needed_s": 78.48026960065533, "can_decide": true, "is_measured": true, "text": "a start with one round of the workload takes about 3.7 s, so 2 h 00 min have room for about 1926 of them"}, "outlook": {"unit": "llama-server.service", "is_there": true, "runs": true, "runs_afterwards": true, "measuring_s": 7200.0, "load_s": 0.4323156719999588, "without_service_s": 7200.432315672, "text": "llama-server.service will not serve for about 2 h 00 min: 2 h 00 min of measuring, then 0.4 s until it answers again, as at its last swap", "port_wait_s": 0.0, "risk": null}, "basis": "e76c4d53c5c68481bcc70a4cb99c41a83d3a5f0b6d54a020b537eb72f50fd00e", "request": {"budget_s": 7200.0, "max_arms": null, "workload": null, "space": [], "seed": 3, "start_after": false, "window": null, "strategy": "physics"}}');
INSERT INTO "summaries" VALUES(5,2,NULL,'sweep','sweep decision','{"what": "promoted", "generation": 4, "text": "through the unit that serves a turn takes 0.127 s; in the pairs it took 0.105 s, before 0.203 s"}');
CREATE TABLE sweep_events (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	event JSON NOT NULL, 
	CONSTRAINT pk_sweep_events PRIMARY KEY (id), 
	CONSTRAINT fk_sweep_events_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
INSERT INTO "sweep_events" VALUES(1,2,'{"event": "boot", "process": "15ed1a93cf/0", "arm": {"engine": "fake", "spec": "mtp", "n_max": 4, "p_min": 0.0, "fit_mib": 0, "kv": "f16", "ubatch": 512, "batch": 2048, "threads": 1, "extra": []}, "purpose": "incumbent", "at_s": 2.0, "seconds": 2.0, "failure": "", "vram_free_mib": null, "request": null, "n_max": 0, "p_min": 0.0, "block": "", "answer": null, "pair": null, "is_earlier": false}');
INSERT INTO "sweep_events" VALUES(2,2,'{"event": "request", "process": "15ed1a93cf/0", "arm": {"engine": "fake", "spec": "mtp", "n_max": 4, "p_min": 0.0, "fit_mib": 0, "kv": "f16", "ubatch": 512, "batch": 2048, "threads": 1, "extra": []}, "purpose": "warm-up", "at_s": 2.043200531429519, "seconds": 0.043200531429519184, "failure": "", "vram_free_mib": null, "request": {"kind": "code", "prompt_id": "15ed1a93cf-1", "cached_tokens": 0, "new_tokens": 64, "n_predict": 8, "concurrency": 1, "ignore_eos": true}, "n_max": 4, "p_min": 0.0, "block": "", "answer": {"cache_n": 0, "prompt_n": 64, "prompt_ms": 3.200039365149565, "predicted_n": 8, "predicted_ms": 40.00049206436956, "wall_ms": 43.200531429519124, "draft_n": 32, "draft_n_accepted": 0}, "pair": null, "is_earlier": false}');
INSERT INTO "sweep_events" VALUES(3,2,'{"event": "request", "process": "15ed1a93cf/0", "arm": {"engine": "fake", "spec": "mtp", "n_max": 4, "p_min": 0.0, "fit_mib": 0, "kv": "f16", "ubatch": 512, "batch": 2048, "threads": 1, "extra": []}, "purpose": "block", "at_s": 2.248813875494254, "seconds": 0.20561334406473497, "failure": "", "vram_free_mib": null, "request": {"kind": "code", "prompt_id": "15ed1a93cf-s0-0", "cached_tokens": 0, "new_tokens": 100, "n_predict": 40, "concurrency": 1, "ignore_eos": true}, "n_max": 4, "p_min": 0.0, "block": "15ed1a93cf-s0", "answer": {"cache_n": 0, "prompt_n": 100, "prompt_ms": 5.014959611334998, "predicted_n": 40, "predicted_ms": 200.59838445339992, "wall_ms": 205.61334406473492, "draft_n": 160, "draft_n_accepted": 0}, "pair": null, "is_earlier": false}');
INSERT INTO "sweep_events" VALUES(4,2,'{"event": "boot", "process": "15ed1a93cf/1", "arm": {"engine": "fake", "spec": "off", "n_max": 0, "p_min": 0.0, "fit_mib": 0, "kv": "f16", "ubatch": 512, "batch": 2048, "threads": 1, "extra": []}, "purpose": "probe", "at_s": 4.248813875494254, "seconds": 2.0, "failure": "", "vram_free_mib": null, "request": null, "n_max": 0, "p_min": 0.0, "block": "", "answer": null, "pair": null, "is_earlier": false}');
INSERT INTO "sweep_events" VALUES(5,2,'{"event": "request", "process": "15ed1a93cf/1", "arm": {"engine": "fake", "spec": "off", "n_max": 0, "p_min": 0.0, "fit_mib": 0, "kv": "f16", "ubatch": 512, "batch": 2048, "threads": 1, "extra": []}, "purpose": "warm-up", "at_s": 4.271950362608018, "seconds": 0.023136487113763593, "failure": "", "vram_free_mib": null, "request": {"kind": "code", "prompt_id": "15ed1a93cf-2", "cached_tokens": 0, "new_tokens": 64, "n_predict": 8, "concurrency": 1, "ignore_eos": true}, "n_max": 0, "p_min": 0.0, "block": "", "answer": {"cache_n": 0, "prompt_n": 64, "prompt_ms": 3.1912396018984603, "predicted_n": 8, "predicted_ms": 19.945247511865375, "wall_ms": 23.136487113763835}, "pair": null, "is_earlier": false}');
INSERT INTO "sweep_events" VALUES(6,2,'{"event": "request", "process": "15ed1a93cf/1", "arm": {"engine": "fake", "spec": "off", "n_max": 0, "p_min": 0.0, "fit_mib": 0, "kv": "f16", "ubatch": 512, "batch": 2048, "threads": 1, "extra": []}, "purpose": "block", "at_s": 4.376019392900783, "seconds": 0.1040690302927656, "failure": "", "vram_free_mib": null, "request": {"kind": "code", "prompt_id": "15ed1a93cf-s0-0", "cached_tokens": 0, "new_tokens": 100, "n_predict": 40, "concurrency": 1, "ignore_eos": true}, "n_max": 0, "p_min": 0.0, "block": "15ed1a93cf-s0", "answer": {"cache_n": 0, "prompt_n": 100, "prompt_ms": 4.955668109179296, "predicted_n": 40, "predicted_ms": 99.11336218358592, "wall_ms": 104.06903029276522}, "pair": null, "is_earlier": false}');
INSERT INTO "sweep_events" VALUES(7,2,'{"event": "boot", "process": "15ed1a93cf/2", "arm": {"engine": "fake", "spec": "off", "n_max": 0, "p_min": 0.0, "fit_mib": 0, "kv": "f16", "ubatch": 512, "batch": 2048, "threads": 1, "extra": []}, "purpose": "race", "at_s": 6.376019392900783, "seconds": 2.0, "failure": "", "vram_free_mib": null, "request": null, "n_max": 0, "p_min": 0.0, "block": "", "answer": null, "pair": null, "is_earlier": false}');
INSERT INTO "sweep_events" VALUES(8,2,'{"event": "request", "process": "15ed1a93cf/2", "arm": {"engine": "fake", "spec": "off", "n_max": 0, "p_min": 0.0, "fit_mib": 0, "kv": "f16", "ubatch": 512, "batch": 2048, "threads": 1, "extra": []}, "purpose": "warm-up", "at_s": 6.3991141487172065, "seconds": 0.023094755816423174, "failure": "", "vram_free_mib": null, "request": {"kind": "code", "prompt_id": "15ed1a93cf-3", "cached_tokens": 0, "new_tokens": 64, "n_predict": 8, "concurrency": 1, "ignore_eos": true}, "n_max": 0, "p_min": 0.0, "block": "", "answer": {"cache_n": 0, "prompt_n": 64, "prompt_ms": 3.1854835608859995, "predicted_n": 8, "predicted_ms": 19.909272255537495, "wall_ms": 23.094755816423493}, "pair": null, "is_earlier": false}');
INSERT INTO "sweep_events" VALUES(9,2,'{"event": "request", "process": "15ed1a93cf/2", "arm": {"engine": "fake", "spec": "off", "n_max": 0, "p_min": 0.0, "fit_mib": 0, "kv": "f16", "ubatch": 512, "batch": 2048, "threads": 1, "extra": []}, "purpose": "block", "at_s": 6.503078065466758, "seconds": 0.10396391674955119, "failure": "", "vram_free_mib": null, "request": {"kind": "code", "prompt_id": "15ed1a93cf-r1-0", "cached_tokens": 0, "new_tokens": 100, "n_predict": 40, "concurrency": 1, "ignore_eos": true}, "n_max": 0, "p_min": 0.0, "block": "15ed1a93cf-r1", "answer": {"cache_n": 0, "prompt_n": 100, "prompt_ms": 4.950662702359601, "predicted_n": 40, "predicted_ms": 99.013254047192, "wall_ms": 103.9639167495516}, "pair": null, "is_earlier": false}');
INSERT INTO "sweep_events" VALUES(10,2,'{"event": "boot", "process": "15ed1a93cf/3", "arm": {"engine": "fake", "spec": "off", "n_max": 0, "p_min": 0.0, "fit_mib": 0, "kv": "f16", "ubatch": 512, "batch": 2048, "threads": 1, "extra": []}, "purpose": "race", "at_s": 8.503078065466758, "seconds": 2.0, "failure": "", "vram_free_mib": null, "request": null, "n_max": 0, "p_min": 0.0, "block": "", "answer": null, "pair": null, "is_earlier": false}');
INSERT INTO "sweep_events" VALUES(11,2,'{"event": "request", "process": "15ed1a93cf/3", "arm": {"engine": "fake", "spec": "off", "n_max": 0, "p_min": 0.0, "fit_mib": 0, "kv": "f16", "ubatch": 512, "batch": 2048, "threads": 1, "extra": []}, "purpose": "warm-up", "at_s": 8.526292022979415, "seconds": 0.023213957512657757, "failure": "", "vram_free_mib": null, "request": {"kind": "code", "prompt_id": "15ed1a93cf-4", "cached_tokens": 0, "new_tokens": 64, "n_predict": 8, "concurrency": 1, "ignore_eos": true}, "n_max": 0, "p_min": 0.0, "block": "", "answer": {"cache_n": 0, "prompt_n": 64, "prompt_ms": 3.2019251741596344, "predicted_n": 8, "predicted_ms": 20.012032338497715, "wall_ms": 23.21395751265735}, "pair": null, "is_earlier": false}');
INSERT INTO "sweep_events" VALUES(12,2,'{"event": "request", "process": "15ed1a93cf/3", "arm": {"engine": "fake", "spec": "off", "n_max": 0, "p_min": 0.0, "fit_mib": 0, "kv": "f16", "ubatch": 512, "batch": 2048, "threads": 1, "extra": []}, "purpose": "block", "at_s": 8.632708721184638, "seconds": 0.10641669820522281, "failure": "", "vram_free_mib": null, "request": {"kind": "code", "prompt_id": "15ed1a93cf-r2-0", "cached_tokens": 0, "new_tokens": 100, "n_predict": 40, "concurrency": 1, "ignore_eos": true}, "n_max": 0, "p_min": 0.0, "block": "15ed1a93cf-r2", "answer": {"cache_n": 0, "prompt_n": 100, "prompt_ms": 5.0674618192963035, "predicted_n": 40, "predicted_ms": 101.34923638592608, "wall_ms": 106.41669820522237}, "pair": null, "is_earlier": false}');
CREATE TABLE verdicts (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	outcome TEXT NOT NULL, 
	sentence TEXT NOT NULL, 
	arm_a TEXT, 
	arm_b TEXT, 
	what TEXT, 
	ratio DOUBLE, 
	ratio_low DOUBLE, 
	ratio_high DOUBLE, 
	level DOUBLE NOT NULL, 
	n_pairs INTEGER, 
	reasons JSON NOT NULL, 
	details JSON NOT NULL, 
	CONSTRAINT pk_verdicts PRIMARY KEY (id), 
	CONSTRAINT fk_verdicts_run_id FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
INSERT INTO "verdicts" VALUES(1,2,'promote','promote: on small, spec mtp -> off, n_max 4 -> 0 is 93.4% faster over 3 pairs, 95 % interval 84.4% to 103.0%','fake, mtp 4/0, margin 0, kv f16, ub 512, b 2048, t 1','fake, no speculation, margin 0, kv f16, ub 512, b 2048, t 1','turn time on small',0.516931322622564,4.92616919027002386766e-01,5.42445827553206583182e-01,0.95,3,'["93.4% faster over 3 pairs, 95 % interval 84.4% to 103.0%"]','{"arm": {"engine": "fake", "spec": "off", "n_max": 0, "p_min": 0.0, "fit_mib": 0, "kv": "f16", "ubatch": 512, "batch": 2048, "threads": 1, "extra": []}, "elapsed_s": 37.545525946419154, "restarts": 14}');
CREATE INDEX ix_runs_started_s ON runs (started_s);
CREATE INDEX ix_arms_fingerprint_id ON arms (fingerprint_id);
CREATE INDEX ix_verdicts_run_id ON verdicts (run_id);
CREATE INDEX ix_sweep_events_run_id ON sweep_events (run_id);
CREATE INDEX ix_memory_loads_memory_key ON memory_loads (memory_key);
CREATE INDEX ix_memory_loads_fingerprint_id ON memory_loads (fingerprint_id);
CREATE INDEX ix_samples_run_id ON samples (run_id);
CREATE INDEX ix_samples_arm_id ON samples (arm_id);
CREATE INDEX ix_summaries_run_id ON summaries (run_id);
CREATE INDEX ix_memory_observations_load_id ON memory_observations (load_id);
COMMIT;

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
INSERT INTO "arms" VALUES(1,1,'speculation on',1,'mainline-0.7.0','mainline','made up, not measured','/opt/llama.cpp/build/bin/llama-server','/srv/models/made-up.gguf','["/opt/llama.cpp/build/bin/llama-server", "--model", "/srv/models/made-up.gguf", "--alias", "made-up", "--host", "127.0.0.1", "--port", "8080", "--ctx-size", "131072", "--parallel", "1", "--flash-attn", "on", "--cache-type-k", "q4_0", "--cache-type-v", "q4_0", "--ubatch-size", "256", "--fit", "on", "--fit-target", "1024", "--spec-type", "draft-mtp", "--spec-draft-n-max", "6", "--spec-draft-p-min", "0.75"]','{}','[["--model /srv/models/made-up.gguf", "model.path", "--set"], ["--ctx-size 131072", "serving.ctx_size", "rtx-3090-ti-24gb.toml"], ["--parallel 1", "serving.n_parallel", "tunerd"], ["--cache-type-k q4_0", "serving.cache_type_k", "rtx-3090-ti-24gb.toml"], ["--fit-target 1024", "memory.fit_mib", "tunerd"], ["--spec-draft-n-max 6", "speculation.n_max", "tuned, 12 November"]]',14);
INSERT INTO "arms" VALUES(2,1,'speculation off',2,'mainline-0.7.0','mainline','made up, not measured','/opt/llama.cpp/build/bin/llama-server','/srv/models/made-up.gguf','["/opt/llama.cpp/build/bin/llama-server", "--model", "/srv/models/made-up.gguf", "--alias", "made-up", "--host", "127.0.0.1", "--port", "8080", "--ctx-size", "131072", "--parallel", "1", "--flash-attn", "on", "--cache-type-k", "q4_0", "--cache-type-v", "q4_0", "--ubatch-size", "256", "--fit", "on", "--fit-target", "1024"]','{}','[["--model /srv/models/made-up.gguf", "model.path", "--set"], ["--ctx-size 131072", "serving.ctx_size", "rtx-3090-ti-24gb.toml"], ["--parallel 1", "serving.n_parallel", "tunerd"], ["--cache-type-k q4_0", "serving.cache_type_k", "rtx-3090-ti-24gb.toml"], ["--fit-target 1024", "memory.fit_mib", "tunerd"]]',NULL);
INSERT INTO "arms" VALUES(3,2,'A',1,'mainline-0.7.0','mainline','made up, not measured','/opt/llama.cpp/build/bin/llama-server','/srv/models/made-up.gguf','["/opt/llama.cpp/build/bin/llama-server", "--model", "/srv/models/made-up.gguf", "--alias", "made-up", "--host", "127.0.0.1", "--port", "8080", "--ctx-size", "131072", "--parallel", "1", "--flash-attn", "on", "--cache-type-k", "q4_0", "--cache-type-v", "q4_0", "--ubatch-size", "256", "--fit", "on", "--fit-target", "1024", "--spec-type", "draft-mtp", "--spec-draft-n-max", "6", "--spec-draft-p-min", "0.75"]','{}','[["--model /srv/models/made-up.gguf", "model.path", "--set"], ["--ctx-size 131072", "serving.ctx_size", "rtx-3090-ti-24gb.toml"], ["--parallel 1", "serving.n_parallel", "tunerd"], ["--cache-type-k q4_0", "serving.cache_type_k", "rtx-3090-ti-24gb.toml"], ["--fit-target 1024", "memory.fit_mib", "tunerd"], ["--spec-draft-n-max 6", "speculation.n_max", "tuned, 12 November"]]',14);
INSERT INTO "arms" VALUES(4,2,'B',3,'ik-b4400','ik','made up, not measured','/opt/llama.cpp/build/bin/llama-server','/srv/models/made-up.gguf','["/opt/llama.cpp/build/bin/llama-server", "--model", "/srv/models/made-up.gguf", "--alias", "made-up", "--host", "127.0.0.1", "--port", "8080", "--ctx-size", "131072", "--parallel", "1", "--flash-attn", "on", "--cache-type-k", "q4_0", "--cache-type-v", "q4_0", "--ubatch-size", "256", "--fit", "on", "--fit-target", "1024", "--spec-type", "draft-mtp", "--spec-draft-n-max", "3", "--spec-draft-p-min", "0.75"]','{}','[["--model /srv/models/made-up.gguf", "model.path", "--set"], ["--ctx-size 131072", "serving.ctx_size", "rtx-3090-ti-24gb.toml"], ["--parallel 1", "serving.n_parallel", "tunerd"], ["--cache-type-k q4_0", "serving.cache_type_k", "rtx-3090-ti-24gb.toml"], ["--fit-target 1024", "memory.fit_mib", "tunerd"], ["--spec-draft-n-max 3", "speculation.n_max", "tuned, 12 November"]]',14);
CREATE TABLE fingerprints (
	id INTEGER NOT NULL, 
	sha256 TEXT NOT NULL, 
	parts JSON NOT NULL, 
	CONSTRAINT pk_fingerprints PRIMARY KEY (id), 
	CONSTRAINT uq_fingerprints_sha256 UNIQUE (sha256)
);
INSERT INTO "fingerprints" VALUES(1,'9733fe1058d7dbd8e70ab2dedacfa9bae6e3e44964bf5efc3dbe57cf96debe3f','{"schema": 1, "engine_sha256": "33f3183a83a9a864b91f224a24cfcb8b84b952b3eb14b3355641aff64531ced4", "driver_version": "570.86.16", "gpu_names": ["NVIDIA GeForce RTX 3090 Ti"], "power_limits_w": [450.0], "cpu_model": "AMD Ryzen 7 9700X 8-Core Processor", "model_sha256": "00d01d4da246dc65260e5b6923ebc4b2a0c5c9d8fee4d970d93ba05335e4ae27", "template_sha256": "34e170fa34263f090820b17f0ad90debb09a3935265c6c14e357c65c875a138a", "arguments_sha256": "860289bc1b53ed0bc315e90286dfdc6927889223d268ec7f36c03b088cd6094e", "workload_sha256": null, "tunerd_version": "0.1.0"}');
INSERT INTO "fingerprints" VALUES(2,'9c66e8bca321a02857f89a109eeb0ee4d6140e9220431dd1cffeecb1730a190d','{"schema": 1, "engine_sha256": "33f3183a83a9a864b91f224a24cfcb8b84b952b3eb14b3355641aff64531ced4", "driver_version": "570.86.16", "gpu_names": ["NVIDIA GeForce RTX 3090 Ti"], "power_limits_w": [450.0], "cpu_model": "AMD Ryzen 7 9700X 8-Core Processor", "model_sha256": "00d01d4da246dc65260e5b6923ebc4b2a0c5c9d8fee4d970d93ba05335e4ae27", "template_sha256": "34e170fa34263f090820b17f0ad90debb09a3935265c6c14e357c65c875a138a", "arguments_sha256": "6c9d826f9ecba0b2048abcd1db8e864d48e8a30093d2119333e7825a781fcbbc", "workload_sha256": null, "tunerd_version": "0.1.0"}');
INSERT INTO "fingerprints" VALUES(3,'414b8d97dbc9228c33c82f11738f1a773db72faf6d2f14c2a279ac67d113d71b','{"schema": 1, "engine_sha256": "eb7ebe6ab2f23515e730c322cd7cd280b0b5ef0e5c4ef1a3a254ee678a32454c", "driver_version": "570.86.16", "gpu_names": ["NVIDIA GeForce RTX 3090 Ti"], "power_limits_w": [450.0], "cpu_model": "AMD Ryzen 7 9700X 8-Core Processor", "model_sha256": "00d01d4da246dc65260e5b6923ebc4b2a0c5c9d8fee4d970d93ba05335e4ae27", "template_sha256": "34e170fa34263f090820b17f0ad90debb09a3935265c6c14e357c65c875a138a", "arguments_sha256": "a109c784c84f50ef11445549c6b12ed43d0811dfa1ccf1592845154d946f17b1", "workload_sha256": null, "tunerd_version": "0.1.0"}');
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
INSERT INTO "runs" VALUES(1,'bench','["mtp"]',1795000300.0,1795000900.0,'done',NULL,'made-up box (no measurement)',4711,'llama-server.service','rtx-3090-ti-24gb','Made-Up 27B Q4_K_M',NULL,'0.1.0','{"kernel": "6.12.0", "memory": {"total_mib": 64000}}');
INSERT INTO "runs" VALUES(2,'compare','["workload"]',1795000000.0,1795000600.0,'done',NULL,'made-up box (no measurement)',4711,'llama-server.service','rtx-3090-ti-24gb','Made-Up 27B Q4_K_M','coding agent and chat','0.1.0','{"kernel": "6.12.0", "memory": {"total_mib": 64000}}');
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
INSERT INTO "samples" VALUES(1,1,1,'mtp','translation','translation','translation-6','life-speculation on',6,1795000042.0,192,1,1,0,300,3.45420428780035535963e+02,192,2.614564269334915025e+03,185,128,'[45, 28, 22, 15, 11, 7]',2.97398469811495033358e+03,3.57420428780035535974e+02,3887,'[]',NULL,1,'{}');
INSERT INTO "samples" VALUES(2,1,1,'mtp','creative_short','creative_short','creative_short-7','life-speculation on',7,1795000049.0,192,1,1,0,300,3.38311185422199457652e+02,192,3.22411460634942568506e+03,190,109,'[56, 24, 11, 9, 7, 2]',3.57642579177162497211e+03,3.50311185422199457663e+02,3887,'[]',NULL,1,'{}');
INSERT INTO "samples" VALUES(3,1,1,'mtp','stepwise_math','stepwise_math','stepwise_math-8','life-speculation on',8,1795000056.0,192,1,1,0,300,3.46285498471682899428e+02,192,1.81286906546850718775e+03,181,157,'[37, 33, 31, 22, 18, 16]',2173.15456394019,3.58285498471682899439e+02,3887,'[]',NULL,1,'{}');
INSERT INTO "samples" VALUES(4,1,1,'mtp','long_code_review','long_code_review','long_code_review-9','life-speculation on',9,1795000063.0,192,1,1,0,300,3.4068199274029126399e+02,192,1.94084912955480149319e+03,178,147,'[39, 30, 27, 21, 17, 13]',2.29553112229509270031e+03,3.52681992740291264001e+02,3887,'[]',NULL,1,'{}');
INSERT INTO "samples" VALUES(5,1,1,'mtp','translation','translation','translation-10','life-speculation on',10,1795000070.0,192,1,1,0,300,3.35565587164290491262e+02,192,2.57195062434011333606e+03,184,126,'[42, 29, 20, 17, 11, 7]',2.92151621150440405482e+03,3.47565587164290491274e+02,3887,'["throttled"]',NULL,0,'{}');
INSERT INTO "samples" VALUES(6,1,1,'mtp','qa_factual','qa_factual','qa_factual-11','life-speculation on',11,1795000077.0,192,1,1,0,300,3.50904640086045219496e+02,192,1.88396316316171191828e+03,179,148,'[37, 32, 27, 22, 18, 12]',2.24886780324775736525e+03,3.62904640086045219508e+02,3887,'["foreign traffic", "server and client clocks disagree"]',NULL,0,'{}');
INSERT INTO "samples" VALUES(7,1,1,'mtp','summarize','summarize','summarize-12','life-speculation on',12,1795000084.0,192,1,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,3887,'[]','no answer within 60 s',0,'{}');
INSERT INTO "samples" VALUES(8,1,2,'mtp','explain_concept','explain_concept','explain_concept-3','life-speculation off',3,1795000021.0,192,1,1,0,300,2.54606399116869766877e+02,192,6.29962332585981584984e+03,NULL,NULL,NULL,6.56822972497668524727e+03,2.66606399116869738461e+02,4587,'[]',NULL,1,'{}');
INSERT INTO "samples" VALUES(9,1,2,'mtp','summarize','summarize','summarize-4','life-speculation off',4,1795000028.0,192,1,1,0,300,2.50968579484444518365e+02,192,6.36508876462046646344e+03,NULL,NULL,NULL,6.63005734410491095326e+03,2.62968579484444489927e+02,4587,'[]',NULL,1,'{}');
INSERT INTO "samples" VALUES(10,1,2,'mtp','qa_factual','qa_factual','qa_factual-5','life-speculation off',5,1795000035.0,192,1,1,0,300,2.63961059565355299133e+02,192,6.4303909105913407986e+03,NULL,NULL,NULL,6.70835197015669655248e+03,2.75961059565355299122e+02,4587,'[]',NULL,1,'{}');
INSERT INTO "samples" VALUES(11,1,2,'mtp','translation','translation','translation-6','life-speculation off',6,1795000042.0,192,1,1,0,300,2.64848585416335765793e+02,192,6.37737196734116423618e+03,NULL,NULL,NULL,6656.2205527575,2.76848585416335765782e+02,4587,'[]',NULL,1,'{}');
INSERT INTO "samples" VALUES(12,1,2,'mtp','creative_short','creative_short','creative_short-7','life-speculation off',7,1795000049.0,192,1,1,0,300,2.56031325556438389408e+02,192,6.39456813923275331056e+03,NULL,NULL,NULL,6.66459946478919209754e+03,2.68031325556438389419e+02,4587,'[]',NULL,1,'{}');
INSERT INTO "samples" VALUES(13,1,2,'mtp','stepwise_math','stepwise_math','stepwise_math-8','life-speculation off',8,1795000056.0,192,1,1,0,300,2.52388442071295344255e+02,192,6.27125224713635725506e+03,NULL,NULL,NULL,6.53764068920765294016e+03,2.64388442071295344244e+02,4587,'[]',NULL,1,'{}');
INSERT INTO "samples" VALUES(14,1,2,'mtp','long_code_review','long_code_review','long_code_review-9','life-speculation off',9,1795000063.0,192,1,1,0,300,2.60556711383181493612e+02,192,6327.43963181453,NULL,NULL,NULL,6.60199634319771121214e+03,2.72556711383181493602e+02,4587,'[]',NULL,1,'{}');
INSERT INTO "samples" VALUES(15,2,3,'workload','coding agent','code_python','code_python-0','life-A',0,1795000000.0,220,1,1,0,4300,4.9038610232175115014e+03,220,1.96156355499068581595e+03,200,178,'[36, 35, 31, 28, 28, 20]',6.87942457820819708996e+03,4.91586102321751150165e+03,3782,'[]',NULL,1,'{}');
INSERT INTO "samples" VALUES(16,2,3,'workload','coding agent','code_python','code_python-1','life-A',1,1795000007.0,220,1,1,0,4300,4.79843623562275570313e+03,220,2.07172286078945580805e+03,206,178,'[43, 38, 31, 26, 22, 18]',6.88415909641221151083e+03,4.81043623562275570295e+03,3782,'[]',NULL,1,'{}');
INSERT INTO "samples" VALUES(17,2,4,'workload','coding agent','code_python','code_python-0','life-B',0,1795000000.0,220,1,1,NULL,4300,4.25406162348392808802e+03,220,2.46888505847196120164e+03,177,154,'[60, 51, 43]',6.7369466819558892893e+03,4.26606162348392808783e+03,3782,'[]',NULL,1,'{}');
CREATE TABLE schema_versions (
	version INTEGER NOT NULL, 
	written_by TEXT NOT NULL, 
	CONSTRAINT pk_schema_versions PRIMARY KEY (version)
);
INSERT INTO "schema_versions" VALUES(1,'tunerd 0.1.0');
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
INSERT INTO "summaries" VALUES(1,2,3,'workload','turn time','{"class": "coding agent", "prefill_s": 4.9, "reasoning_s": 5.1, "decode_s": 3.2, "weight": 0.7}');
INSERT INTO "summaries" VALUES(2,2,3,'workload','turn time','{"class": "chat", "prefill_s": 0.4, "reasoning_s": null, "decode_s": 6.4, "weight": 0.3}');
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
INSERT INTO "verdicts" VALUES(1,2,'B is faster','B is 4.1 % faster on chat, 95 % interval 2.0 to 6.2 %','A','B','turn time on chat',0.959,0.938,0.98,0.95,24,'["prefill of the deepest class is not worse", "1,216 MiB of VRAM stay free"]','{}');
CREATE INDEX ix_runs_started_s ON runs (started_s);
CREATE INDEX ix_arms_fingerprint_id ON arms (fingerprint_id);
CREATE INDEX ix_verdicts_run_id ON verdicts (run_id);
CREATE INDEX ix_samples_arm_id ON samples (arm_id);
CREATE INDEX ix_samples_run_id ON samples (run_id);
CREATE INDEX ix_summaries_run_id ON summaries (run_id);
COMMIT;

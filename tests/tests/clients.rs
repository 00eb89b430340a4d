//! Generated clients and command line tools against a running platform: Go, TypeScript and Python,
//! `buf curl`, grpcurl. Needs Go, Node and Python; `cargo xtask full` runs it.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use tests::call::AUDITOR;
use tests::process::{Platform, binary};
use tests::shared::{platform, run};
use tokio::process::Command;
use tokio::sync::OnceCell;

/// Timeout of a tool that calls a port.
const TOOL: Duration = Duration::from_secs(20);
/// Timeout of the first installation of all tools.
const INSTALLATION: Duration = Duration::from_secs(900);

const WITH_RPC: [&str; 8] = [
    "all",
    "ledger",
    "cfa",
    "payments",
    "market",
    "identity",
    "approvals",
    "chain",
];
const PLAIN_HTTP: [&str; 2] = ["bank", "chain_rpc"];

/// Installs the tools and generates the code on first use; returns their folder.
async fn tools() -> &'static Path {
    static TOOLS: OnceCell<PathBuf> = OnceCell::const_new();
    let install = async || {
        let script = repository().join("tests/clients/install.sh");
        let mut command = Command::new(script);
        command.arg(binary());
        let output = finished(command, INSTALLATION).await;
        assert!(output.status.success(), "{}", text(&output));
        let stdout = String::from_utf8_lossy(&output.stdout);
        PathBuf::from(stdout.lines().last().expect("the script printed no folder"))
    };
    TOOLS.get_or_init(install).await
}

fn repository() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("the workspace")
}

async fn finished(mut command: Command, limit: Duration) -> Output {
    let running = command.kill_on_drop(true).output();
    let output = tokio::time::timeout(limit, running).await;
    let output = output.unwrap_or_else(|_| panic!("{command:?} did not end within {limit:?}"));
    output.expect("the program starts")
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{out}{err}")
}

/// Runs a tool that must succeed; returns its standard output and error.
async fn printed(program: &Path, args: &[&str]) -> String {
    let mut command = Command::new(program);
    command.args(args);
    let output = finished(command, TOOL).await;
    assert!(
        output.status.success(),
        "{program:?} {args:?}: {}",
        text(&output)
    );
    text(&output)
}

/// Runs a tool that must fail; returns its standard output and error.
async fn refused(program: &Path, args: &[&str]) -> String {
    let mut command = Command::new(program);
    command.args(args);
    let output = finished(command, TOOL).await;
    assert!(
        !output.status.success(),
        "{program:?} {args:?}: {}",
        text(&output)
    );
    text(&output)
}

fn address(platform: &Platform, listener: &str) -> String {
    platform.url(listener).replace("http://", "")
}

// rows: R001 R325
#[test]
fn r325_generated_clients_in_go_typescript_and_python_call_the_platform() {
    run(async {
        let (tools, platform) = (tools().await, platform().await);
        let url = platform.url("all");
        let go = printed(&tools.join("bin/go-client"), &[&url, AUDITOR]).await;
        let tsx = tools.join("ts/node_modules/.bin/tsx");
        let client = tools.join("ts/client.ts");
        let ts = printed(&tsx, &[&client.to_string_lossy(), &url, AUDITOR]).await;
        let client = repository().join("tests/clients/python/client.py");
        let generated = tools.join("contracts/gen/python");
        let [client, generated] = [&client, &generated].map(|path| path.to_string_lossy());
        let args = [&*client, &*generated, &url, AUDITOR];
        let python = printed(&tools.join("venv/bin/python"), &args).await;
        for (printed, language, lines) in
            [(go, "Go", 4), (ts, "TypeScript", 3), (python, "Python", 2)]
        {
            let done = printed.lines().filter(|line| line.starts_with(language));
            assert_eq!(done.count(), lines, "{printed}");
        }
    });
}

// rows: R017
#[test]
fn r017_a_removed_field_breaks_the_contract() {
    run(async {
        let contracts = tools().await.join("contracts");
        let proto = repository().join("proto");
        let breaking = async |dir: &Path| {
            let mut command = Command::new(proto.join("node_modules/.bin/buf"));
            let image = proto.join("baseline.binpb");
            command
                .args(["breaking", ".", "--against"])
                .arg(image)
                .current_dir(dir);
            finished(command, TOOL).await
        };
        let unchanged = breaking(&contracts).await;
        assert!(unchanged.status.success(), "{}", text(&unchanged));

        let changed = tempfile::tempdir().expect("a folder");
        let mut copy = Command::new("cp");
        copy.arg("-r").arg(contracts.join(".")).arg(changed.path());
        assert!(finished(copy, TOOL).await.status.success());
        let file = changed.path().join("dfa/market/v1/market.proto");
        let schema = std::fs::read_to_string(&file).expect("the schema");
        let cut = schema.replacen("  dfa.common.v1.Decimal price = 7;\n", "", 1);
        assert_ne!(schema, cut, "the field to remove is not in the schema");
        std::fs::write(&file, cut).expect("written");
        let broken = breaking(changed.path()).await;
        assert!(
            !broken.status.success() && text(&broken).contains("price"),
            "{}",
            text(&broken)
        );
    });
}

// rows: R325
#[test]
fn r325_buf_curl_calls_by_reflection_in_every_protocol() {
    run(async {
        tools().await;
        let platform = platform().await;
        let buf = repository().join("proto/node_modules/.bin/buf");
        let token = format!("Authorization: Bearer {AUDITOR}");
        let call = |listener: &str, id: &str| {
            let method = "dfa.cfa.v1.CfaRegistryService/GetInstrument";
            let url = format!("{}/{method}", platform.url(listener));
            let data = format!(r#"{{"instrumentId":"{id}"}}"#);
            (url, data)
        };
        for protocol in ["connect", "grpc", "grpcweb"] {
            let (url, data) = call("cfa", "CFA-RUB");
            let args = [
                "curl",
                "--protocol",
                protocol,
                "--http2-prior-knowledge",
                "-H",
                &token,
                "-d",
                &data,
                &url,
            ];
            let found = printed(&buf, &args).await;
            assert!(found.contains("CFA-RUB"), "{protocol}: {found}");
            let (url, data) = call("cfa", "NO-SUCH-THING");
            let args = [
                "curl",
                "--protocol",
                protocol,
                "--http2-prior-knowledge",
                "-H",
                &token,
                "-d",
                &data,
                &url,
            ];
            let missing = refused(&buf, &args).await;
            assert!(missing.contains("not_found"), "{protocol}: {missing}");
            // Buf decodes the details of Connect errors only.
            let reason = match protocol {
                "connect" => "INSTRUMENT_NOT_FOUND",
                _ => "ChRJTlNUUlVNRU5UX05PVF9GT1VORBIIcGxhdGZvcm0",
            };
            assert!(missing.contains("google.rpc.ErrorInfo"), "{missing}");
            assert!(missing.contains(reason), "{protocol}: {missing}");
        }
        // These ports do not serve the service, so buf needs its schema.
        let schema = repository().join("proto");
        let schema = schema.to_string_lossy();
        for listener in ["ledger", "bank", "chain_rpc"] {
            let (url, data) = call(listener, "CFA-RUB");
            for protocol in ["connect", "grpc"] {
                let args = [
                    "curl",
                    "--schema",
                    &schema,
                    "--protocol",
                    protocol,
                    "--http2-prior-knowledge",
                    "-H",
                    &token,
                    "-d",
                    &data,
                    &url,
                ];
                let answer = refused(&buf, &args).await;
                assert!(
                    answer.contains("unimplemented"),
                    "{listener}, {protocol}: {answer}"
                );
            }
        }
    });
}

// rows: R325
#[test]
fn r325_buf_curl_checks_the_health_in_every_protocol() {
    run(async {
        tools().await;
        let platform = platform().await;
        let buf = repository().join("proto/node_modules/.bin/buf");
        let url = format!("{}/grpc.health.v1.Health/Check", platform.url("all"));
        for protocol in ["connect", "grpc", "grpcweb"] {
            let http2 = "--http2-prior-knowledge";
            let args = ["curl", "--protocol", protocol, http2, "-d", "{}", &url];
            let health = printed(&buf, &args).await;
            assert!(health.contains("\"SERVING\""), "{protocol}: {health}");
        }
    });
}

// rows: R325
#[test]
fn r325_grpcurl_lists_and_calls_every_port_and_a_wrong_one_refuses() {
    run(async {
        let (tools, platform) = (tools().await, platform().await);
        let grpcurl = tools.join("bin/grpcurl");
        let token = format!("authorization: Bearer {AUDITOR}");
        for listener in WITH_RPC {
            let address = address(platform, listener);
            let listed = printed(&grpcurl, &["-plaintext", &address, "list"]).await;
            let own = match listener {
                "all" => "dfa.sandbox.v1.",
                listener => &format!("dfa.{listener}.v1."),
            };
            assert!(listed.contains(own), "{listener}: {listed}");
            assert!(
                listed.contains("grpc.reflection.v1."),
                "{listener}: {listed}"
            );
            let health = ["-plaintext", &address, "grpc.health.v1.Health/Check"];
            let health = printed(&grpcurl, &health).await;
            assert!(health.contains("SERVING"), "{listener}: {health}");
            let symbol = ["-plaintext", &address, "describe", "google.rpc.ErrorInfo"];
            let described = printed(&grpcurl, &symbol).await;
            assert!(described.contains("reason"), "{listener}: {described}");
        }
        let call = [
            "-plaintext",
            "-H",
            &token,
            "-d",
            r#"{"instrumentId":"NO-SUCH-THING"}"#,
            &address(platform, "cfa"),
            "dfa.cfa.v1.CfaRegistryService/GetInstrument",
        ];
        let missing = refused(&grpcurl, &call).await;
        assert!(missing.contains("INSTRUMENT_NOT_FOUND"), "{missing}");
        for listener in PLAIN_HTTP {
            let list = ["-plaintext", &address(platform, listener), "list"];
            let answer = refused(&grpcurl, &list).await;
            assert!(
                answer.contains("does not support the reflection API"),
                "{listener}: {answer}"
            );
        }
    });
}

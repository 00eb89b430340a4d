//! Verifies signatures by a configured command: software that is certified for an algorithm, for
//! example GOST R 34.10.
//!
//! The command runs without a shell. It gets the names of four files and decides by its exit
//! status:
//!
//! | exit status | meaning |
//! |---|---|
//! | 0 | the signature is valid |
//! | 126, 127, a signal | the software did not run (as in a shell): `Unavailable` |
//! | any other | the signature is refused |
//!
//! The signer is the owner of the certificate in the signature. The command gets that certificate
//! as a file and must verify with it alone: the signature could contain others.
//!
//! Known limitation: the certificate's validity is judged at the command's time, which is that of
//! the machine. A command that leaves its process group is not killed at the time-out.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use async_trait::async_trait;
use rustix::process::{Pid, Signal, kill_process_group};
use service_kit::KeyedMutex;
use signatures::{SignedBy, claimed_signer};
use tokio::io::AsyncReadExt;
use tokio::process::Command;
use tokio::sync::Semaphore;

use super::{Signed, Verifier, invalid, unreadable};
use crate::CfaConfig;
use crate::error::{Error, Refusal};

/// Limit of commands that run at a time. An issuer has one of them at most.
const COMMANDS_MAX: usize = 4;
/// Limit of the command's error output that is logged. The rest is read and dropped.
const OUTPUT_BYTES_MAX: u64 = 1_024;
/// Limit of `signature_timeout_ms`: less than an approved call may take.
const TIMEOUT_MS_MAX: u64 = 7_000;
/// Kind of the finding in health.
const FINDING: &str = "signatures";
/// Arguments for which the names of files are given. Each is needed.
const CONTENT: &str = "{content}";
const SIGNATURE: &str = "{signature}";
const CERTIFICATE: &str = "{certificate}";
const AUTHORITIES: &str = "{ca}";

/// Verifies with certified software, which has algorithms that [`signatures::CmsVerifier`] lacks.
pub struct CommandVerifier {
    /// Program and arguments.
    command: Vec<String>,
    ca_file: PathBuf,
    timeout: Duration,
    /// Folder of the files of running commands.
    folder: PathBuf,
    health: rpc::Health,
    /// One lock per issuer. Lock order: after those of the service.
    issuers: KeyedMutex<String>,
    running: Semaphore,
}

impl CommandVerifier {
    /// # Errors
    /// `Config`: an argument is missing, the time-out is out of range, or the folder for the
    /// command's files cannot be made.
    pub fn open(config: &CfaConfig, ca_file: &Path, health: &rpc::Health) -> Result<Self, Error> {
        let command = config.signature_command.clone();
        for needed in [CONTENT, SIGNATURE, CERTIFICATE, AUTHORITIES] {
            if !command.iter().skip(1).any(|argument| argument == needed) {
                let problem = format!("cfa.signature_command needs the argument {needed}");
                return Err(Error::Config(problem));
            }
        }
        if !(1..=TIMEOUT_MS_MAX).contains(&config.signature_timeout_ms) {
            let problem = format!("cfa.signature_timeout_ms must be 1 to {TIMEOUT_MS_MAX}");
            return Err(Error::Config(problem));
        }
        let folder = config.data_dir.join("signatures");
        // A killed process leaves the files of its commands.
        let made = match std::fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => std::fs::create_dir_all(&folder),
        };
        made.map_err(|error| unreadable(&folder, &error))?;
        Ok(Self {
            command,
            ca_file: ca_file.to_owned(),
            timeout: Duration::from_millis(config.signature_timeout_ms),
            folder,
            health: health.clone(),
            issuers: KeyedMutex::default(),
            running: Semaphore::new(COMMANDS_MAX),
        })
    }

    /// Runs the command on files in `folder`, which does not exist yet. Returns its exit status and
    /// the beginning of its error output. Dropping the future kills the command.
    async fn run(&self, folder: &Path, contents: [&[u8]; 3]) -> io::Result<(ExitStatus, Vec<u8>)> {
        tokio::fs::create_dir(folder).await?;
        let files = ["content", "content.sig", "certificate.pem"].map(|name| folder.join(name));
        for (file, bytes) in files.iter().zip(contents) {
            tokio::fs::write(file, bytes).await?;
        }
        let (program, arguments) = self.command.split_first().expect("checked at the start");
        let mut command = Command::new(program);
        for argument in arguments {
            match argument.as_str() {
                CONTENT => command.arg(&files[0]),
                SIGNATURE => command.arg(&files[1]),
                CERTIFICATE => command.arg(&files[2]),
                AUTHORITIES => command.arg(&self.ca_file),
                other => command.arg(other),
            };
        }
        command.stdin(Stdio::null()).stdout(Stdio::null());
        // A group of its own, so that a script is killed with what it has started.
        let mut child = command.stderr(Stdio::piped()).process_group(0).spawn()?;
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        // Dropped before the child, so its id is not that of another process yet.
        let mut group = Group(id.and_then(Pid::from_raw));
        let mut said = Vec::new();
        if let Some(mut errors) = child.stderr.take() {
            let mut first = (&mut errors).take(OUTPUT_BYTES_MAX);
            first.read_to_end(&mut said).await?;
            tokio::io::copy(&mut errors, &mut tokio::io::sink()).await?;
        }
        let status = child.wait().await?;
        group.0 = None;
        Ok((status, said))
    }

    /// Shows in health that signatures cannot be verified.
    fn unavailable(&self, why: &str) -> Error {
        let reason = format!("the command {} {why}", self.command[0]);
        self.health.set_finding(FINDING, Some(&reason));
        Error::Unavailable("Verification of signatures")
    }
}

#[async_trait]
impl Verifier for CommandVerifier {
    async fn verify(
        &self,
        signed: Signed<'_>,
        signature: &[u8],
        _now_us: i64,
    ) -> Result<SignedBy, Error> {
        let claimed = claimed_signer(signature).map_err(invalid)?;
        let content = match signed.document {
            [] => signed.hash.as_slice(),
            document => document,
        };
        let contents = [content, signature, claimed.certificate_pem.as_bytes()];
        let _issuer = self.issuers.lock(signed.issuer_id).await;
        let _running = self.running.acquire().await.expect("never closed");
        let files = Files(self.folder.join(uuid::Uuid::now_v7().to_string()));
        let ran = tokio::time::timeout(self.timeout, self.run(&files.0, contents)).await;
        let (status, said) = match ran {
            Ok(Ok(ended)) => ended,
            Ok(Err(error)) => return Err(self.unavailable(&format!("cannot run: {error}"))),
            Err(_) => {
                let why = format!("did not end in {} ms", self.timeout.as_millis());
                return Err(self.unavailable(&why));
            }
        };
        if !status.success() {
            let (said, issuer_id) = (String::from_utf8_lossy(&said), signed.issuer_id);
            tracing::warn!(issuer_id, %status, ?said, "the command did not accept a signature");
        }
        if matches!(status.code(), None | Some(126 | 127)) {
            return Err(self.unavailable(&format!("did not verify: {status}")));
        }
        self.health.set_finding(FINDING, None);
        if !status.success() {
            let why = format!("is refused by the configured command ({status})");
            return Err(Refusal::field("signature", why).into());
        }
        Ok(claimed.signer)
    }
}

/// The process group of a running command, killed unless it has ended.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // It fails if no process of the group is left.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Folder of one command's files, removed at its end.
struct Files(PathBuf);

impl Drop for Files {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(folder = %self.0.display(), %error, "files of a signature are left");
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use sha2::{Digest as _, Sha256};

    use super::*;

    /// Signatures that OpenSSL made of the file `document`, and their authority.
    const OPENSSL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../signatures/tests/openssl");

    fn fixture(name: &str) -> Vec<u8> {
        std::fs::read(Path::new(OPENSSL).join(name)).expect(name)
    }

    fn config(data_dir: &Path, command: &[&str]) -> CfaConfig {
        CfaConfig {
            data_dir: data_dir.to_owned(),
            signature_command: command.iter().map(|part| (*part).to_owned()).collect(),
            ..CfaConfig::default()
        }
    }

    fn open(config: &CfaConfig) -> CommandVerifier {
        let health = rpc::Health::new("cfa");
        let opened = CommandVerifier::open(config, &Path::new(OPENSSL).join("ca.pem"), &health);
        opened.expect("opened")
    }

    /// The command is a script; `$1` to `$4` are the names of the files.
    fn scripted(data_dir: &Path, script: &str) -> CommandVerifier {
        let arguments = [CONTENT, SIGNATURE, CERTIFICATE, AUTHORITIES];
        let command = [["sh", "-c", script, "sh"], arguments].concat();
        open(&config(data_dir, &command))
    }

    /// What an issuer's signature is found to be. The scripts do not verify it.
    async fn verify(
        verifier: &CommandVerifier,
        issuer_id: &str,
        document: &[u8],
        signature: &[u8],
    ) -> &'static str {
        let signed = Signed {
            issuer_id,
            hash: Sha256::digest(document).into(),
            document,
        };
        match verifier.verify(signed, signature, 0).await {
            Ok(signer) => {
                assert_eq!(signer.common_name, "issuer-1");
                "valid"
            }
            Err(Error::Refused(Refusal::Field { field, .. })) => {
                assert_eq!(field, "signature");
                "refused"
            }
            Err(Error::Unavailable(_)) => "unavailable",
            Err(error) => panic!("{error}"),
        }
    }

    fn finding(verifier: &CommandVerifier) -> Option<String> {
        verifier.health.findings().remove(FINDING)
    }

    #[tokio::test]
    async fn openssl_verifies_a_document() {
        let mut version = std::process::Command::new("openssl");
        if version.arg("version").output().is_err() {
            eprintln!("openssl is not installed: nothing is tested");
            return;
        }
        let folder = tempfile::tempdir().expect("folder");
        let command = "openssl cms -verify -binary -inform DER -in {signature} -content {content} \
                       -CAfile {ca} -certfile {certificate} -nointern -out /dev/null";
        let command: Vec<&str> = command.split_whitespace().collect();
        let verifier = open(&config(folder.path(), &command));
        for name in ["ec.cms", "rsa.cms"] {
            let (document, signature) = (fixture("document"), fixture(name));
            let valid = verify(&verifier, "issuer-1", &document, &signature).await;
            assert_eq!(valid, "valid", "{name}");
            let other = verify(&verifier, "issuer-1", b"another", &signature).await;
            assert_eq!(other, "refused", "{name}");
        }
        assert_eq!(finding(&verifier), None);
    }

    #[tokio::test]
    async fn the_exit_status_decides_and_no_file_is_left() {
        let signature = fixture("ec.cms");
        for (script, expected) in [
            (
                "test -s \"$1\" && test -s \"$2\" && grep -q BEGIN \"$3\" && test -s \"$4\"",
                "valid",
            ),
            ("exit 1", "refused"),
            // More than a pipe holds.
            ("head -c 200000 /dev/zero >&2; exit 4", "refused"),
            ("exit 126", "unavailable"),
            ("no-such-verifier", "unavailable"),
            ("kill -9 $$", "unavailable"),
        ] {
            let folder = tempfile::tempdir().expect("folder");
            let verifier = scripted(folder.path(), script);
            let found = verify(&verifier, "issuer-1", b"decision", &signature).await;
            assert_eq!(found, expected, "{script}");
            let is_found = finding(&verifier).is_some();
            assert_eq!(is_found, expected == "unavailable", "{script}");
            let mut left = std::fs::read_dir(&verifier.folder).expect("folder");
            assert!(left.next().is_none(), "{script}");
        }
    }

    #[tokio::test]
    async fn the_content_is_the_document_or_the_bytes_of_its_hash() {
        let folder = tempfile::tempdir().expect("folder");
        let kept = folder.path().join("kept");
        let verifier = scripted(folder.path(), &format!("cp \"$1\" '{}'", kept.display()));
        for document in [b"decision".as_slice(), b"".as_slice()] {
            let hash: signatures::Digest = Sha256::digest(b"decision").into();
            let signed = Signed {
                issuer_id: "issuer-1",
                hash,
                document,
            };
            let valid = verifier.verify(signed, &fixture("ec.cms"), 0).await;
            valid.expect("valid");
            let content = std::fs::read(&kept).expect("content");
            let expected = match document {
                [] => hash.as_slice(),
                _ => document,
            };
            assert_eq!(content, expected);
        }
    }

    #[tokio::test]
    async fn a_late_command_is_killed_with_what_it_started() {
        let folder = tempfile::tempdir().expect("folder");
        let late = folder.path().join("late");
        let script = format!("(sleep 1; touch '{}') & wait", late.display());
        let verifier = CommandVerifier {
            timeout: Duration::from_millis(200),
            ..scripted(folder.path(), &script)
        };
        let found = verify(&verifier, "issuer-1", b"decision", &fixture("ec.cms")).await;
        assert_eq!(found, "unavailable");
        let reason = finding(&verifier).expect("a finding");
        assert_eq!(reason, "the command sh did not end in 200 ms");
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        assert!(!late.exists(), "what the script started was killed");
    }

    #[tokio::test]
    async fn an_absent_program_is_found_until_a_command_has_run() {
        let folder = tempfile::tempdir().expect("folder");
        let program = folder.path().join("verify");
        let name = program.to_str().expect("UTF-8");
        let arguments = [CONTENT, SIGNATURE, CERTIFICATE, AUTHORITIES];
        let command = [[name, "-c", "exit 1", "sh"], arguments].concat();
        let verifier = open(&config(folder.path(), &command));
        let signature = fixture("ec.cms");
        let found = verify(&verifier, "issuer-1", b"decision", &signature).await;
        assert_eq!(found, "unavailable");
        // No command ran for bytes that are no signature.
        let found = verify(&verifier, "issuer-1", b"decision", b"no signature").await;
        assert_eq!(found, "refused");
        let reason = finding(&verifier).expect("a finding");
        assert!(reason.contains("verify cannot run"), "{reason}");
        std::os::unix::fs::symlink("/bin/sh", &program).expect("installed");
        let found = verify(&verifier, "issuer-1", b"decision", &signature).await;
        assert_eq!(found, "refused");
        assert_eq!(finding(&verifier), None);
    }

    #[tokio::test]
    async fn an_issuer_has_one_command_and_all_have_four_at_most() {
        let signature = fixture("ec.cms");
        let issuers = ["a", "b", "c", "d", "e", "f", "g", "h"];
        for (issuers, at_once) in [(["a"; 8], 1), (issuers, COMMANDS_MAX)] {
            let folder = tempfile::tempdir().expect("folder");
            let running = folder.path().join("running");
            std::fs::create_dir(&running).expect("folder");
            let script = format!(
                "cd '{}' && touch $$ && test $(ls | wc -l) -le {at_once} && sleep 0.1; \
                 result=$?; rm $$; exit $result",
                running.display()
            );
            let verifier = scripted(folder.path(), &script);
            let calls = issuers.map(|issuer| verify(&verifier, issuer, b"decision", &signature));
            assert_eq!(join_all(calls).await, ["valid"; 8], "{at_once}");
        }
    }

    #[test]
    fn a_command_needs_all_arguments_and_a_time() {
        let folder = tempfile::tempdir().expect("folder");
        let all = ["verify", CONTENT, SIGNATURE, CERTIFICATE, AUTHORITIES];
        let refused = |config: &CfaConfig| {
            let health = rpc::Health::new("cfa");
            let opened = CommandVerifier::open(config, Path::new("ca.pem"), &health);
            opened.err().expect("refused").to_string()
        };
        for needed in 1..all.len() {
            let mut command = all.to_vec();
            let missing = command.remove(needed);
            let error = refused(&config(folder.path(), &command));
            assert!(error.ends_with(missing), "{error}");
        }
        for signature_timeout_ms in [0, TIMEOUT_MS_MAX + 1] {
            let error = refused(&CfaConfig {
                signature_timeout_ms,
                ..config(folder.path(), &all)
            });
            assert!(error.contains("signature_timeout_ms"), "{error}");
        }
    }
}

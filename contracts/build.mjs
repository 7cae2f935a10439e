// Compiles the contracts and writes `artifacts/`, those of the devnet beside their sources; with --check, recompiles and compares instead.
//
//     cd contracts && npm install --no-package-lock && node build.mjs [--check]
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import solc from "solc";

const DEVNET = "../crates/x402-devnet/contracts";
// Where each is: its artifact is in `artifacts` of the same place, or of this one for contracts of the tests.
const SOURCES = {
  "BatchSettler.sol": ".", "DevnetBatchSettlement.sol": DEVNET, "DevnetErc3009Collector.sol": DEVNET, "DevnetExactProxy.sol": DEVNET, "DevnetMulticall3.sol": DEVNET,
  "DevnetPermit2.sol": DEVNET, "DevnetUptoProxy.sol": DEVNET, "DevnetUsdc.sol": DEVNET, "PaymentProbe.sol": ".", "PermitProbe.sol": ".",
  "test/FeeToken.sol": ".", "test/HostileToken.sol": ".", "test/TestWallet.sol": ".",
};
const SETTINGS = {
  optimizer: { enabled: true, runs: 10000 },
  evmVersion: "cancun",
  // Without the metadata hash the same source gives the same bytes, whatever the path it is compiled from.
  metadata: { bytecodeHash: "none", appendCBOR: false },
};

const here = dirname(fileURLToPath(import.meta.url));
const pinned = JSON.parse(readFileSync(join(here, "package.json"), "utf8")).dependencies.solc;
if (!solc.version().startsWith(pinned + "+")) {
  console.error(`solc ${solc.version()} is installed, ${pinned} is wanted`);
  process.exit(1);
}

const output = JSON.parse(solc.compile(JSON.stringify({
  language: "Solidity",
  sources: Object.fromEntries(Object.entries(SOURCES).map(([path, place]) => [path, { content: readFileSync(join(here, place, path), "utf8") }])),
  settings: {
    ...SETTINGS,
    outputSelection: { "*": { "*": ["abi", "evm.bytecode.object", "evm.deployedBytecode.object"] } },
  },
})));
const problems = output.errors ?? [];
problems.forEach((problem) => console.error(problem.formattedMessage));
if (problems.length > 0) process.exit(1);

const check = process.argv.includes("--check");
let differing = 0;
for (const [path, place] of Object.entries(SOURCES)) {
  const contractName = basename(path, ".sol");
  const { abi, evm } = output.contracts[path][contractName];
  const artifact = JSON.stringify({
    contractName,
    solc: solc.version(),
    settings: SETTINGS,
    abi,
    bytecode: "0x" + evm.bytecode.object,
    deployedBytecode: "0x" + evm.deployedBytecode.object,
  }, null, 1) + "\n";
  const file = join(here, place, "artifacts", contractName + ".json");
  if (!check) {
    writeFileSync(file, artifact);
  } else if (!existsSync(file) || readFileSync(file, "utf8") !== artifact) {
    console.error(`${contractName}: the artifact is not what the source compiles to`);
    differing += 1;
  }
}
if (check) console.log(differing === 0 ? "all artifacts match their sources" : `${differing} artifacts differ`);
process.exit(differing === 0 ? 0 : 1);

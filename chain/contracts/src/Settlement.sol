// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {CfaToken} from "./CfaToken.sol";
import {ISSUE, Roles, SETTLE} from "./Roles.sol";

/// Delivery against payment, many trades in one transaction.
///
/// A trade moves units from the seller to the buyer, CFA-RUB from the buyer to the seller, and the
/// fee from the buyer to the fee account. It is atomic: each trade runs in its own call, and a
/// failed call removes only its trade from the batch (`TradeFailed`). The call has a limit of gas,
/// and of its reason a limited part is logged, so no token can make the batch fail.
///
/// A batch is accepted once by its id, a trade once by its number. Trades have dense numbers per
/// token from 1, so "seen" is one bit, 256 per storage slot. The revert of a failed trade also
/// clears its bit: a later batch can contain the trade again.
contract Settlement is Roles {
    /// Gas of one trade. The costliest one (every slot cold and new) needs about 130,000.
    uint256 public constant TRADE_GAS = 150_000;
    /// Left before each trade, so that the call gets all of `TRADE_GAS` (EIP-150). A gas limit that
    /// is too low fails the whole batch and never a single trade.
    uint256 public constant GAS_RESERVE_PER_TRADE = 200_000;
    /// Bytes of a reason in `TradeFailed`.
    uint256 public constant REASON_MAX = 256;

    CfaToken public immutable money;
    address public immutable feeAccount;

    mapping(bytes32 batchId => bool) public batchAccepted;
    mapping(address token => mapping(uint256 slot => uint256 bits)) private tradesSeen;

    event BatchSettled(bytes32 indexed batchId, uint256 settled, uint256 failed);
    event TradeSettled(bytes32 indexed batchId, address indexed token, uint256 indexed tradeNumber);
    event TradeFailed(bytes32 indexed batchId, address indexed token, uint256 indexed tradeNumber, bytes reason);
    event IssueSettled(
        bytes32 indexed issueId, address indexed token, address indexed investor, uint256 units, uint256 payment
    );

    error BatchAlreadyAccepted(bytes32 batchId);
    error TradeAlreadyAccepted(address token, uint256 tradeNumber);
    error OnlySelf();
    error MalformedBatch();
    error GasTooLow();

    constructor(
        CfaToken money_,
        address feeAccount_,
        address owner_,
        address[] memory accounts,
        uint256[] memory roles
    ) Roles(owner_, accounts, roles) {
        money = money_;
        feeAccount = feeAccount_;
    }

    function tradeAccepted(address token, uint256 tradeNumber) external view returns (bool) {
        return tradesSeen[token][tradeNumber >> 8] & (1 << (tradeNumber & 0xff)) != 0;
    }

    /// `trades` holds two words per trade, most significant bits first:
    ///   word 0: trade number (64 bits) | index into tokens (16) | buyer's index in members (24)
    ///           | seller's index in members (24) | quantity (128)
    ///   word 1: payment to the seller (128) | fee (128)
    /// Trade number 0 is a paid transfer without a trade: only its batch id protects it from a
    /// repeat.
    function settleTrades(
        bytes32 batchId,
        address[] calldata tokens,
        address[] calldata members,
        uint256[] calldata trades
    ) external onlyRole(SETTLE) {
        if (batchAccepted[batchId]) revert BatchAlreadyAccepted(batchId);
        if (trades.length & 1 != 0) revert MalformedBatch();
        batchAccepted[batchId] = true;
        uint256 failed = 0;
        for (uint256 i = 0; i < trades.length; i += 2) {
            uint256 head = trades[i];
            address token = tokens[(head >> 176) & 0xffff];
            if (gasleft() < GAS_RESERVE_PER_TRADE) revert GasTooLow();
            bool done = _try(
                token, head, members[(head >> 152) & 0xffffff], members[(head >> 128) & 0xffffff], trades[i + 1]
            );
            if (done) {
                emit TradeSettled(batchId, token, head >> 192);
            } else {
                ++failed;
                emit TradeFailed(batchId, token, head >> 192, _reason());
            }
        }
        emit BatchSettled(batchId, trades.length / 2 - failed, failed);
    }

    /// One trade, of the two words of `settleTrades`. External only so that its failure reverts it
    /// alone.
    function exchange(address token, uint256 head, address buyer, address seller, uint256 tail) external {
        if (msg.sender != address(this)) revert OnlySelf();
        uint256 tradeNumber = head >> 192;
        if (tradeNumber != 0) {
            uint256 bit = 1 << (tradeNumber & 0xff);
            uint256 seen = tradesSeen[token][tradeNumber >> 8];
            if (seen & bit != 0) revert TradeAlreadyAccepted(token, tradeNumber);
            tradesSeen[token][tradeNumber >> 8] = seen | bit;
        }
        CfaToken(token).operatorTransfer(seller, buyer, head & type(uint128).max);
        money.operatorPay(buyer, seller, tail >> 128, feeAccount, tail & type(uint128).max);
    }

    /// Primary placement: new units to the investor against CFA-RUB to the issuer. `issueId` is
    /// accepted once.
    function issueAgainstPayment(
        bytes32 issueId,
        CfaToken token,
        address investor,
        uint256 units,
        address issuer,
        uint256 payment
    ) external onlyRole(ISSUE) {
        if (batchAccepted[issueId]) revert BatchAlreadyAccepted(issueId);
        batchAccepted[issueId] = true;
        if (payment != 0) money.operatorTransfer(investor, issuer, payment);
        token.mint(investor, units);
        emit IssueSettled(issueId, address(token), investor, units, payment);
    }

    /// Calls `exchange` with `TRADE_GAS`. Encodes the call into free memory without reserving it,
    /// and copies no returned data: memory and gas of a batch do not grow with its tokens' answers.
    function _try(address token, uint256 head, address buyer, address seller, uint256 tail)
        private
        returns (bool done)
    {
        bytes4 selector = this.exchange.selector;
        assembly ("memory-safe") {
            let data := mload(0x40)
            mstore(data, selector)
            mstore(add(data, 0x04), token)
            mstore(add(data, 0x24), head)
            mstore(add(data, 0x44), buyer)
            mstore(add(data, 0x64), seller)
            mstore(add(data, 0x84), tail)
            done := call(TRADE_GAS, address(), 0, data, 0xa4, 0, 0)
        }
    }

    /// The first `REASON_MAX` bytes that the last call returned.
    function _reason() private pure returns (bytes memory reason) {
        assembly ("memory-safe") {
            let size := returndatasize()
            if gt(size, REASON_MAX) { size := REASON_MAX }
            reason := mload(0x40)
            mstore(reason, size)
            returndatacopy(add(reason, 0x20), 0, size)
            mstore(0x40, add(reason, 0x120))
        }
    }
}
